"""GGUF: what a file holds comes out as the Hugging Face checkpoint it was made from, blocks dequantised exactly."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.demo import demo_model
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.weights import Checkpoint, open_checkpoint
from jaxserve.weights.dequantize import dequantize
from jaxserve.weights.gguf import tensor_values
from jaxserve.weights.gguf_config import llama3_factors
from jaxserve.weights.gguf_header import read_header
from jaxserve.weights.mapped import MappedFile

GOLDEN = Path(__file__).parents[2] / "golden"
TINY = GOLDEN / "formats" / "tiny.gguf"
BLOCKS = np.load(GOLDEN / "formats" / "gguf_blocks.npz")
POOL = ThreadPoolExecutor(2)
TYPES = sorted(name.removesuffix(".bytes") for name in BLOCKS if name.endswith(".bytes"))


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.supports("checkpoints", f"GGUF {k}")) for k in TYPES]
)
def test_blocks_dequantise_to_the_reference_values(kind):
    values = dequantize(BLOCKS[f"{kind}.bytes"].reshape(-1), GGMLQuantizationType[kind], (6, 512), POOL)
    np.testing.assert_array_equal(values, BLOCKS[f"{kind}.dequant"])


def test_many_rows_in_many_pieces_equal_the_package_row_by_row():
    blocks = np.tile(BLOCKS["Q4_K.bytes"], (97, 1))
    expected = gguf.quants.dequantize(blocks, GGMLQuantizationType.Q4_K)
    np.testing.assert_array_equal(
        dequantize(blocks.reshape(-1), GGMLQuantizationType.Q4_K, expected.shape, POOL), expected
    )


def test_a_file_of_every_type_gives_the_reference_values():
    file = MappedFile(str(TINY))
    tensors = read_header(file).tensors
    for name, info in tensors.items():
        if f"{info.type.name}.dequant" in BLOCKS:
            np.testing.assert_array_equal(
                tensor_values(file, info, POOL), BLOCKS[f"{info.type.name}.dequant"], name
            )
    np.testing.assert_array_equal(tensor_values(file, tensors["f32.weight"], POOL), BLOCKS["source"])
    np.testing.assert_array_equal(
        tensor_values(file, tensors["f16.weight"], POOL), (BLOCKS["source"] / 64).astype(np.float16)
    )


def test_the_header_is_what_the_packages_own_reader_finds():
    ours, theirs = read_header(MappedFile(str(TINY))), GGUFReader(TINY)
    for name, value in ours.metadata.items():
        assert value == pytest.approx(theirs.fields[name].contents()), name
    assert [(n, t.type, t.offset, t.nbytes) for n, t in ours.tensors.items()] == [
        (t.name, t.tensor_type, t.data_offset, t.n_bytes) for t in theirs.tensors
    ]


# What llama.cpp's converter does, reduced to the architectures here; names come from the package's own map.
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "gemma2": "gemma2", "gemma3": "gemma3", "olmo2": "olmo2", "olmo3": "olmo2",
}  # fmt: skip


def write_gguf(file: Path, golden: str, arch: str, **writing: Any) -> tuple[dict[str, Any], Checkpoint]:
    """The golden checkpoint as GGUF; returns the config and the tensors that it was made from."""
    source = open_checkpoint(str(GOLDEN / golden))
    config = source.config
    writer = GGUFWriter(file, arch, **writing)
    write_metadata(writer, config)
    map_ = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    for name in source.names():
        values = source.read(name).astype(np.float32)
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            kv = "num_key_value_heads" if "k_proj" in name else "num_attention_heads"
            values = values.reshape(config[kv], 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        renamed = map_.get_name(name, try_suffixes=(".weight", ".bias"))
        assert renamed is not None, name
        writer.add_tensor(renamed, np.ascontiguousarray(values))
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", factors_of(config).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config, source


def factors_of(config: dict[str, Any]) -> np.ndarray:
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return llama3_factors(config["rope_theta"] ** -(np.arange(0, head, 2) / head), config["rope_scaling"])


def write_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if "layer_types" in config:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") in ("yarn", "linear"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        if "original_max_position_embeddings" in scaling:
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if "attention_factor" in scaling:
            writer.add_rope_scaling_attn_factors(scaling["attention_factor"])
        if "beta_fast" in scaling:
            writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])


# Facts a GGUF file cannot tell: llama.cpp assumes those of the released models.
NOT_IN_GGUF = {
    "gemma2": {"query_pre_attn_scalar"},
    "gemma3": {"query_pre_attn_scalar", "sliding_window_pattern"},
    "qwen2": {"max_window_layers", "sliding_window"},  # not used: use_sliding_window is false
    "qwen3": {"max_window_layers"},
}
NO_MATTER = {
    "torch_dtype", "attention_dropout", "initializer_range", "use_cache", "pretraining_tp", "cache_implementation",
    "pad_token_id",
}  # fmt: skip


@pytest.mark.parametrize(
    "golden", [pytest.param(g, marks=pytest.mark.supports("GGUF architectures", g)) for g in ARCHITECTURES]
)
def test_a_converted_model_comes_back_as_it_was(tmp_path, golden):
    file = tmp_path / "model.gguf"
    config, source = write_gguf(file, golden, ARCHITECTURES[golden])
    checkpoint = open_checkpoint(str(file))
    assert set(checkpoint.names()) == set(source.names())
    for name in source.names():
        tolerance = (
            2e-7 if "gemma" in golden and name.endswith("norm.weight") else 0
        )  # 1 was added and taken off
        np.testing.assert_allclose(
            checkpoint.read(name), source.read(name).astype(np.float32), rtol=0, atol=tolerance, err_msg=name
        )
    for key in config.keys() - NO_MATTER - NOT_IN_GGUF.get(golden, set()):
        assert checkpoint.config[key] == pytest.approx(config[key]), key
    assert checkpoint.config["tie_word_embeddings"] == ("lm_head.weight" not in source.names())


def test_unknown_rope_factors_are_kept_one_by_one(tmp_path):
    file = tmp_path / "model.gguf"
    writer = small_writer(file)
    factors = np.array([1, 1.7, 2.9, 31], np.float32)
    writer.add_tensor("rope_freqs.weight", factors)
    finish(writer)
    scaling = open_checkpoint(str(file)).config["rope_scaling"]
    assert scaling["rope_type"] == "longrope" and scaling["attention_factor"] == 1.0
    np.testing.assert_array_equal(np.float32(scaling["short_factor"]), factors)
    assert scaling["short_factor"] == scaling["long_factor"]


@pytest.mark.parametrize("length", [8192, 64])
def test_llama3_factors_are_recognised(tmp_path, length):
    file = tmp_path / "model.gguf"
    writer = small_writer(file)
    scaling = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": length,
    }  # fmt: skip
    config = {"rope_theta": 5e5, "head_dim": 64, "rope_scaling": scaling}
    writer.add_rope_freq_base(5e5)
    writer.add_tensor("rope_freqs.weight", factors_of(config).astype(np.float32))
    finish(writer)
    assert open_checkpoint(str(file)).config["rope_scaling"] == scaling


def small_writer(file: Path, arch: str = "llama", **writing: Any) -> GGUFWriter:
    """A model of one layer's worth of metadata, width 16, two heads, and an embedding."""
    writer = GGUFWriter(file, arch, **writing)
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.arange(10 * 16, dtype=np.float32).reshape(10, 16))
    return writer


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def small(tmp_path) -> Path:
    file = tmp_path / "small.gguf"
    writer = small_writer(file)
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((16, 16), np.float32))
    finish(writer)
    return file


def test_a_split_model_is_one_model_whichever_part_is_named(tmp_path):
    golden = open_checkpoint(str(GOLDEN / "qwen3"))
    (tmp_path / "split").mkdir()
    write_gguf(tmp_path / "split" / "m.gguf", "qwen3", "qwen3", split_max_tensors=13)
    parts = sorted((tmp_path / "split").iterdir())
    assert len(parts) == 3
    for path in (tmp_path / "split", *parts):
        checkpoint = open_checkpoint(str(path))
        assert set(checkpoint.names()) == set(golden.names())
    parts[1].unlink()
    with pytest.raises(CheckpointError, match="part of the split model is missing"):
        open_checkpoint(str(parts[0]))


def test_bfloat16_and_float16_stay_as_stored(tmp_path):
    file = tmp_path / "model.gguf"
    writer = small_writer(file)
    values = np.linspace(-2, 2, 32, dtype=np.float32).reshape(2, 16)
    writer.add_tensor("blk.0.ffn_up.weight", values.astype(np.float16))
    as_bfloat16 = values.astype(ml_dtypes.bfloat16)
    writer.add_tensor(
        "blk.0.ffn_gate.weight",
        as_bfloat16.view(np.uint8).reshape(2, 32),
        raw_dtype=GGMLQuantizationType.BF16,
    )
    finish(writer)
    checkpoint = open_checkpoint(str(file))
    for name, stored in (("up", values.astype(np.float16)), ("gate", as_bfloat16)):
        read = checkpoint.read(f"model.layers.0.mlp.{name}_proj.weight")
        assert read.dtype == stored.dtype
        np.testing.assert_array_equal(read, stored)


def test_an_architecture_that_is_not_known_is_refused_with_those_that_are(tmp_path):
    finish(small_writer(tmp_path / "m.gguf", "mamba"))
    with pytest.raises(CheckpointError, match=r"unsupported GGUF architecture.*llama, qwen2.*found mamba"):
        open_checkpoint(str(tmp_path / "m.gguf"))


def test_experts_are_refused(tmp_path):
    writer = small_writer(tmp_path / "m.gguf")
    writer.add_expert_count(8)
    finish(writer)
    with pytest.raises(CheckpointError, match="mixture-of-experts"):
        open_checkpoint(str(tmp_path / "m.gguf"))


def test_a_type_that_cannot_be_dequantised_is_refused_by_name(tmp_path):
    writer = small_writer(tmp_path / "m.gguf")
    writer.add_tensor(
        "blk.0.ffn_up.weight", np.zeros((1, 292), np.uint8), raw_dtype=GGMLQuantizationType.Q8_K
    )
    finish(writer)
    with pytest.raises(CheckpointError, match=r"unsupported tensor type.*up_proj.*found Q8_K"):
        open_checkpoint(str(tmp_path / "m.gguf")).read("model.layers.0.mlp.up_proj.weight")


def test_missing_metadata_is_refused_by_its_key(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 16), np.float32))
    finish(writer)
    with pytest.raises(CheckpointError, match=r"llama\.attention\.head_count is unusable"):
        open_checkpoint(str(tmp_path / "m.gguf"))


def test_a_truncated_file_names_the_tensor(small):
    small.write_bytes(small.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"truncated.*tensor blk\.0\.attn_q\.weight"):
        open_checkpoint(str(small))


HEADERS = {
    "another format": (0, b"GGML", "not a GGUF file"),
    "a version of the future": (4, (9).to_bytes(4, "little"), "found version 9"),
    "big-endian": (4, (3).to_bytes(4, "big"), "big-endian"),
    "a tensor count beyond the file": (8, (1 << 60).to_bytes(8, "little"), "cannot fit"),
    "a pair count beyond the file": (16, (1 << 60).to_bytes(8, "little"), "cannot fit"),
    "a key longer than the file": (24, (1 << 50).to_bytes(8, "little"), "cannot fit"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_is_checked_before_it_is_believed(small, case):
    at, content, problem = HEADERS[case]
    whole = small.read_bytes()
    small.write_bytes(whole[:at] + content + whole[at + len(content) :])
    with pytest.raises(CheckpointError, match=problem) as refusal:
        open_checkpoint(str(small))
    assert refusal.value.file == str(small)


@given(data=st.data())
def test_no_damage_gives_anything_but_a_refusal_or_tensors_within_the_file(tmp_path_factory, data):
    content = bytearray(TINY.read_bytes())
    header = 1664
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(1, len(content)))]
    path = tmp_path_factory.mktemp("bad") / "f.gguf"
    path.write_bytes(bytes(content))
    file = MappedFile(str(path))
    try:
        tensors = read_header(file).tensors
    except CheckpointError:
        return
    for info in tensors.values():
        assert len(file.view(info.offset, info.nbytes)) == info.nbytes
        assert math.prod(info.shape) < 8 * len(content)


@given(data=st.data())
def test_no_damage_to_metadata_gives_anything_but_a_refusal_or_tensors_of_their_shape(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("bad") / "f.gguf"
    finish(small_writer(path))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(24, len(content) - 640 - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content))
    try:
        checkpoint = open_checkpoint(str(path))
        for name in checkpoint.names():
            assert checkpoint.read(name).shape == checkpoint.shape(name)
    except CheckpointError:
        pass


@pytest.mark.supports("checkpoints", "GGUF")
def test_a_real_model_opens_with_its_shapes():
    try:
        path = demo_model("smollm2")
    except ConfigError as why:
        pytest.skip(str(why))
    checkpoint = open_checkpoint(path)
    assert len(list(checkpoint.names())) == 272
    config = checkpoint.config
    assert (config["hidden_size"], config["num_hidden_layers"], config["head_dim"]) == (576, 30, 64)
    assert (
        config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 100000.0 and config["tie_word_embeddings"]
    )
    shapes = {
        "model.embed_tokens.weight": (49152, 576),
        "model.layers.29.self_attn.k_proj.weight": (192, 576),
        "model.layers.0.mlp.down_proj.weight": (576, 1536),
        "model.norm.weight": (576,),
    }
    for name, shape in shapes.items():
        assert checkpoint.read(name).shape == checkpoint.shape(name) == shape
    file = MappedFile(path)
    stored = read_header(file).tensors["blk.3.attn_k.weight"]
    blocks = file.view(stored.offset, stored.nbytes).reshape(192, -1)
    values = gguf.quants.dequantize(blocks, stored.type)
    np.testing.assert_array_equal(
        checkpoint.read("model.layers.3.self_attn.k_proj.weight"),
        values.reshape(3, 32, 2, 576).swapaxes(1, 2).reshape(192, 576),
    )


def test_the_config_is_plain_json(small):
    assert json.loads(json.dumps(open_checkpoint(str(small)).config))["model_type"] == "llama"
