"""Quantised checkpoints read as plain ones: every scheme gives the weights that its published layout stands for."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.weights import convert, open_checkpoint

GOLDEN = Path(__file__).parents[2] / "golden"
FORMATS = GOLDEN / "formats"
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
RNG = np.random.default_rng(0)


def close(got: np.ndarray, want: np.ndarray) -> None:
    """Equal to the last bit or two of float32."""
    np.testing.assert_allclose(got, want, rtol=2**-22, atol=0)


def vectors(name: str) -> dict[str, np.ndarray]:
    with np.load(FORMATS / f"{name}.npz") as file:
        return dict(file)


@pytest.fixture
def published(tmp_path):
    """`published(file, settings)`: published matrices as a checkpoint with these settings."""

    def write(file: str, **settings):
        shutil.copyfile(FORMATS / f"{file}.safetensors", tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
        return open_checkpoint(str(tmp_path))

    return write


@pytest.mark.supports("quantised checkpoints", "FP8, 128 x 128 blocks (DeepSeek)")
def test_fp8_blocks_are_cut_by_the_edge(published):
    checkpoint = published("fp8_block128", quant_method="fp8", weight_block_size=[128, 128])
    z = vectors("fp8_block128")
    assert list(checkpoint.names()) == [f"w{i}.weight" for i in range(4)]
    for i in range(4):
        assert checkpoint.shape(f"w{i}.weight") == z[f"w{i}.dequant"].shape
        np.testing.assert_array_equal(checkpoint.read(f"w{i}.weight"), z[f"w{i}.dequant"])


@pytest.mark.supports("quantised checkpoints", "AWQ INT4")
@pytest.mark.parametrize("which", ["sym", "asym"])
def test_awq(published, which):
    checkpoint = published(f"int4_awq_{which}", quant_method="awq", bits=4, group_size=128)
    np.testing.assert_array_equal(checkpoint.read("w.weight"), vectors("int4")[f"{which}.dequant"])


@pytest.mark.supports("quantised checkpoints", "GPTQ INT4, with activation order")
@pytest.mark.parametrize("which", ["sym", "asym", "actorder"])
def test_gptq(published, which):
    settings = {"bits": 4, "group_size": 128, "desc_act": which == "actorder"}
    checkpoint = published(f"int4_gptq_{which}", quant_method="gptq", **settings)
    np.testing.assert_array_equal(checkpoint.read("w.weight"), vectors("int4")[f"{which}.dequant"])
    assert (checkpoint.packed("w.weight") is None) == (which == "actorder")


@pytest.mark.supports("quantised checkpoints", "compressed-tensors W4A16")
def test_compressed_tensors_int4(published):
    group = {"weights": {"num_bits": 4, "group_size": 128, "strategy": "group"}}
    checkpoint = published(
        "int4_compressed_tensors",
        quant_method="compressed-tensors",
        format="pack-quantized",
        config_groups={"a": group},
    )
    np.testing.assert_array_equal(checkpoint.read("w.weight"), vectors("int4")["ct.dequant"])


@pytest.mark.supports("quantised checkpoints", "MXFP4 (gpt-oss)")
def test_mxfp4_blocks_are_the_transpose_of_the_plain_repository(published):
    got = published("mxfp4", quant_method="mxfp4").read("w")
    np.testing.assert_array_equal(got, vectors("mxfp4")["dequant"].T)


@pytest.mark.supports("quantised checkpoints", "NVFP4 (ModelOpt, compressed-tensors)")
@pytest.mark.parametrize("method, want", [("modelopt", "dequant"), ("compressed-tensors", "dequant_ct")])
def test_nvfp4(published, method, want):
    checkpoint = published("nvfp4", quant_method=method)
    close(checkpoint.read(method.replace("-", "_") + ".weight"), vectors("nvfp4")[want])


def test_modelopt_may_say_so_in_a_file_of_its_own(tmp_path):
    shutil.copyfile(FORMATS / "nvfp4.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    settings = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    close(open_checkpoint(str(tmp_path)).read("modelopt.weight"), vectors("nvfp4")["dequant"])


def quantised(folder, tensors, **settings):
    return open_checkpoint(str(folder(tensors, quantization_config=settings)))


@pytest.mark.supports("quantised checkpoints", "FP8 and INT8, a scale a row or a matrix")
@pytest.mark.parametrize("code", [E4M3, ml_dtypes.float8_e5m2, np.int8])
@pytest.mark.parametrize("sharing", [(), (1,), (5,), (5, 1), (5, 4)])
def test_scales_of_rows_groups_and_matrices(folder, code, sharing):
    codes = (RNG.standard_normal((5, 12)) * 30).astype(code)
    scale = RNG.random(sharing, np.float32).astype(BF16)
    tensors = {"a.weight": codes, "a.weight_scale": scale, "a.input_scale": np.ones(1, np.float32)}
    checkpoint = quantised(folder, tensors, quant_method="compressed-tensors", format="float-quantized")
    grid = scale.astype(np.float32).reshape(*sharing, *(1,) * (2 - len(sharing)))
    if sharing == (1,):
        grid = grid.reshape(1, 1)
    want = codes.astype(np.float32) * np.repeat(grid, 12 // grid.shape[1], axis=1)
    assert list(checkpoint.names()) == ["a.weight"]
    np.testing.assert_array_equal(checkpoint.read("a.weight"), want)


def test_int8_with_zero_points(folder):
    codes = RNG.integers(-128, 128, (4, 6), np.int8)
    scale, zero = np.full((4, 1), 0.5, np.float32), np.array([[3], [-4], [0], [127]], np.int8)
    tensors = {"a.weight": codes, "a.weight_scale": scale, "a.weight_zero_point": zero}
    got = quantised(folder, tensors, quant_method="compressed-tensors").read("a.weight")
    np.testing.assert_array_equal(got, (codes.astype(np.float32) - zero) * scale)


def test_experts_that_are_one_tensor(folder):
    codes, scale = (RNG.standard_normal((2, 130, 140)) * 30).astype(E4M3), RNG.random((2, 2, 2), np.float32)
    tensors = {"experts.gate_up_proj": codes, "experts.gate_up_proj_scale_inv": scale}
    got = quantised(folder, tensors, quant_method="fp8", weight_block_size=[128, 128]).read(
        "experts.gate_up_proj"
    )
    spread = np.repeat(np.repeat(scale, 128, axis=1)[:, :130], 128, axis=2)[:, :, :140]
    np.testing.assert_array_equal(got, codes.astype(np.float32) * spread)


def packed_columns(codes: np.ndarray, bits: int) -> np.ndarray:
    """Eight or four columns an int32, the first in the lowest bits, the last one filled up with zeros."""
    each = 32 // bits
    codes = np.pad(codes.astype(np.uint32), [(0, 0), (0, -codes.shape[1] % each)])
    words = np.zeros((len(codes), codes.shape[1] // each), np.uint32)
    for i in range(each):
        words |= codes[:, i::each] << np.uint32(bits * i)
    return words.view(np.int32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape, group", [((5, 64), 32), ((8, 80), 32), ((3, 45), 45), ((16, 48), 48)])
@pytest.mark.parametrize("zeros, moved", [(False, False), (True, False), (True, True)])
def test_compressed_tensors_integers(folder, bits, shape, group, zeros, moved):
    f, d = shape
    count, top = -(-d // group), 2**bits
    codes, zero = RNG.integers(0, top, shape), RNG.integers(0, top, (f, count))
    scale = RNG.random((f, count), np.float32).astype(BF16)
    groups = np.arange(d, dtype=np.int32) // group
    groups = RNG.permutation(groups) if moved else groups
    tensors = {
        "a.weight_packed": packed_columns(codes, bits),
        "a.weight_scale": scale,
        "a.weight_shape": np.array(shape),
    }
    if zeros:
        tensors["a.weight_zero_point"] = np.ascontiguousarray(packed_columns(zero.T, bits).T)
    if moved:
        tensors["a.weight_g_idx"] = groups
    config = {"x": {"weights": {"group_size": -1 if group == d else group, "num_bits": bits}}}
    checkpoint = quantised(
        folder, tensors, quant_method="compressed-tensors", format="pack-quantized", config_groups=config
    )
    middle = zero[:, groups] if zeros else top // 2
    want = (codes - middle).astype(np.float32) * scale.astype(np.float32)[:, groups]
    assert checkpoint.shape("a.weight") == shape
    np.testing.assert_array_equal(checkpoint.read("a.weight"), want)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version, offset", [("gptq", 1), ("gptq_v2", 0)])
def test_gptq_with_a_last_group_that_is_cut(folder, bits, version, offset):
    f, d, group, top = 8, 40, 32, 2**bits
    codes, zero = RNG.integers(0, top, (f, d)), RNG.integers(1, top, (f, 2))
    scale = RNG.random((2, f), np.float32).astype(np.float16)
    tensors = {
        "a.qweight": np.ascontiguousarray(packed_columns(codes, bits).T),
        "a.qzeros": packed_columns(zero.T - offset, bits),
        "a.scales": scale,
    }
    settings = {"bits": bits, "group_size": group, "checkpoint_format": version}
    checkpoint = quantised(folder, tensors, quant_method="gptq", **settings)
    groups = np.arange(d) // group
    want = (codes - zero[:, groups]).astype(np.float32) * scale.astype(np.float32).T[:, groups]
    np.testing.assert_array_equal(checkpoint.read("a.weight"), want)


def test_compressed_tensors_mxfp4(folder):
    z = vectors("mxfp4")
    tensors = {"a.weight_packed": z["blocks"].reshape(40, 64), "a.weight_scale": z["scales"]}
    got = quantised(folder, tensors, quant_method="compressed-tensors", format="mxfp4-pack-quantized").read(
        "a.weight"
    )
    np.testing.assert_array_equal(got, z["dequant"])


@pytest.mark.supports("quantised checkpoints", "bitsandbytes NF4, FP4 and INT8")
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_nf4(folder, nested):
    shape, size = (6, 64), 6 * 64
    codes, table = RNG.integers(0, 16, size), np.sort(RNG.standard_normal(16)).astype(np.float32)
    state: dict = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    absmax = RNG.random(size // 64, np.float32)
    tensors = {
        "a.weight": (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
        "a.weight.quant_map": table,
    }
    if nested:
        state |= {"nested_blocksize": 4, "nested_offset": 0.25}
        coarse, fine = RNG.random(2, np.float32), RNG.standard_normal(256).astype(np.float32)
        absmax_codes = RNG.integers(0, 256, len(absmax), np.uint8)
        tensors |= {"a.weight.nested_absmax": coarse, "a.weight.nested_quant_map": fine}
        absmax = fine[absmax_codes] * coarse[np.arange(len(absmax)) // 4] + np.float32(0.25)
        tensors["a.weight.absmax"] = absmax_codes
    else:
        tensors["a.weight.absmax"] = absmax
    tensors["a.weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    checkpoint = quantised(folder, tensors, quant_method="bitsandbytes", load_in_4bit=True)
    assert list(checkpoint.names()) == ["a.weight"] and checkpoint.shape("a.weight") == shape
    want = (table[codes] * absmax[np.arange(size) // 64]).reshape(shape)
    np.testing.assert_array_equal(checkpoint.read("a.weight"), want)


def test_bitsandbytes_int8(folder):
    codes, rows = RNG.integers(-127, 128, (3, 8), np.int8), np.array([1, 2, 3], np.float32)
    checkpoint = quantised(folder, {"a.weight": codes, "a.SCB": rows}, quant_method="bitsandbytes")
    close(checkpoint.read("a.weight"), codes * rows[:, None] / np.float32(127))


def test_what_is_not_quantised_is_shown_as_it_is(folder):
    tensors = {
        "model.embed_tokens.weight": np.ones((4, 8), np.float32),
        "a.weight": np.ones((4, 8), E4M3),
        "a.weight_scale": np.float32([2]),
        "a.k_scale": np.float32([1]),
    }
    checkpoint = quantised(
        folder, tensors, quant_method="modelopt", quant_algo="FP8", ignore=["lm_head", "model.embed*"]
    )
    assert sorted(checkpoint.names()) == ["a.weight", "model.embed_tokens.weight"]
    assert "quantization_config" not in checkpoint.config
    np.testing.assert_array_equal(checkpoint.read("model.embed_tokens.weight"), 1)
    assert checkpoint.nbytes("a.weight") == 4 * 8 + 4


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"quant_method": "aqlm"}, "expected quant_method fp8, .* found quant_method aqlm"),
        (
            {"quant_method": "awq", "bits": 4, "version": "gemv"},
            "version.* expected None or gemm .* found gemv",
        ),
        ({"quant_method": "gptq", "bits": 3}, "bits.* expected 4 or 8; found 3"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format.* found marlin-24"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo.* found W4A8_AWQ"),
        ({"quant_method": "fp8"}, r"codes without scales; tensor a\.weight.*expected a\.weight_scale_inv"),
        ({"quant_method": "fp8", "ignore": ["b"]}, "codes without scales"),
    ],
)
def test_what_cannot_be_read_right_is_refused_by_name(folder, settings, words):
    with pytest.raises(CheckpointError, match=words):
        quantised(folder, {"a.weight": np.ones((2, 4), E4M3)}, **settings)


@pytest.mark.parametrize("pattern", ["a.b", "a", "b", "re:.*b$", "a.*", "*b"])
def test_scales_of_a_module_on_the_ignore_list_are_refused(folder, pattern):
    tensors = {"a.b.weight": np.ones((2, 4), E4M3), "a.b.weight_scale": np.float32([1])}
    with pytest.raises(CheckpointError, match=r"as not quantised, but a\.b is stored with scales"):
        quantised(folder, tensors, quant_method="fp8", modules_to_not_convert=[pattern])
    quantised(folder, tensors, quant_method="fp8", modules_to_not_convert=["ab", "bb", "a.c", "re:b"])


def test_scales_of_an_unknown_shape_are_refused(folder):
    tensors = {"a.weight": np.ones((4, 8), E4M3), "a.weight_scale_inv": np.ones((3, 3), np.float32)}
    with pytest.raises(CheckpointError, match=r"fits no way.*or blocks of \[2, 4\]; found \[3, 3\]"):
        quantised(folder, tensors, quant_method="fp8", weight_block_size=[2, 4])


def test_groups_that_are_no_groups_are_refused_when_read(folder):
    tensors = {
        "a.qweight": np.zeros((8, 8), np.int32), "a.qzeros": np.zeros((2, 1), np.int32),
        "a.scales": np.ones((2, 8), np.float16), "a.g_idx": np.zeros(64, np.int32),
    }  # fmt: skip
    checkpoint = quantised(folder, tensors, quant_method="gptq", bits=4, group_size=32, desc_act=True)
    with pytest.raises(CheckpointError, match=r"malformed; tensor a\.qweight.*groups of 32"):
        checkpoint.read("a.weight")


@pytest.mark.parametrize(
    "arch", ["deepseek_v3_fp8", "gpt_oss_mxfp4", "kimi_k2_int4_ct", "qwen2_awq_int4", "qwen2_gptq_int4"]
)
def test_a_whole_checkpoint_converts_and_reads_back_the_same(arch, tmp_path):
    plain = open_checkpoint(str(GOLDEN / arch))
    convert(str(GOLDEN / arch), str(tmp_path / "converted"), progress=False)
    converted = open_checkpoint(str(tmp_path / "converted"))
    assert set(converted.names()) == set(plain.names())
    for name in plain.names():
        assert np.isfinite(plain.read(name)).all()
        np.testing.assert_array_equal(converted.read(name), plain.read(name))
