"""Weights that stay in low bits: on one device and over several they have the codes and values of the checkpoint."""

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.errors import CheckpointError
from jaxserve.weights import load, open_checkpoint
from jaxserve.weights.packing import packed_bytes, reblocked
from pallas_kernels.formats import FP8_BLOCK, INT8_CHANNEL, MXFP4, QTensor, dequantise, int4, quantise
from sharding.params import Cut, Param

RNG = np.random.default_rng(0)
CT = {"quant_method": "compressed-tensors"}


@pytest.fixture
def fp8(folder):
    """A checkpoint of two matrices [192, 256] in blocks of 128 x 128."""
    tensors = {}
    for name in "ab":
        tensors[f"{name}.weight"] = (RNG.standard_normal((192, 256)) * 50).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}.weight_scale_inv"] = RNG.random((2, 2), np.float32)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return open_checkpoint(str(folder(tensors, quantization_config=settings)))


@pytest.fixture
def mxfp4(folder):
    """gpt-oss' experts [4, 64, 2 * 48] as it stores them, transposed."""
    blocks = RNG.integers(0, 256, (4, 96, 2, 16), np.uint8)
    scales = RNG.integers(120, 130, (4, 96, 2), np.uint8)
    tensors = {"e.gate_up_proj_blocks": blocks, "e.gate_up_proj_scales": scales}
    return open_checkpoint(str(folder(tensors, quantization_config={"quant_method": "mxfp4"})))


def sharding(*spec) -> NamedSharding:
    return NamedSharding(jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,)), P(*spec))


def test_a_stack_holds_the_bytes_of_the_file(fp8):
    param = Param((2, 192, 256), (None, "ffn", None), ("a.weight", "b.weight"))
    (w,) = load([param], fp8, np.float32, low_bit=True)
    assert isinstance(w, QTensor) and w.format == FP8_BLOCK and w.shape == (2, 192, 256)
    assert w.nbytes == packed_bytes(param, fp8) == 2 * (192 * 256 + 16)
    (plain,) = load([param], fp8, np.float32)
    np.testing.assert_array_equal(dequantise(w), plain)


def test_experts_that_are_stored_transposed_and_in_turns(mxfp4):
    odd = Cut(1, 96, slice(1, 96, 2))
    param = Param((4, 48, 64), ("experts", "ffn", None), "e.gate_up_proj", swapped=True, cut=odd)
    (w,) = load([param], mxfp4, np.float32, low_bit=True)
    (plain,) = load([param], mxfp4, np.float32)
    assert w.format == MXFP4
    np.testing.assert_array_equal(dequantise(w), plain)


@pytest.mark.parametrize(
    "shape, axes", [((192, 256), ("vocab", None)), ((12, 16, 256), ("heads", None, None))]
)
def test_what_is_not_only_multiplied_is_dequantised(fp8, shape, axes):
    (w,) = load([Param(shape, axes, "a.weight")], fp8, np.float32, low_bit=True)
    assert isinstance(w, jax.Array) and w.dtype == np.float32


@pytest.mark.supports("quantised checkpoints", "low bits on the device, blocks divided exactly")
@pytest.mark.parametrize(
    "spec, block", [(("x", None), (16, 128)), ((None, "x"), (128, 64)), ((None, None), (128, 128))]
)
def test_blocks_that_a_border_cuts_are_divided_exactly(fp8, spec, block):
    param = Param((192, 256), (None, None), "a.weight")
    (w,) = load([param], fp8, np.float32, [sharding(*spec)], low_bit=True)
    assert w.format.block == block and w.codes.sharding.spec == P(*spec)
    (plain,) = load([param], fp8, np.float32)
    np.testing.assert_array_equal(dequantise(jax.tree.map(np.asarray, w)), plain)
    for shard in w.codes.addressable_shards:
        rows, columns = (s.indices(n) for s, n in zip(shard.index, w.shape, strict=True))
        assert rows[0] % block[0] == 0 and columns[0] % block[1] == 0


def test_experts_are_divided_with_their_scales(mxfp4):
    param = Param((4, 96, 64), ("experts", None, None), "e.gate_up_proj", swapped=True)
    (w,) = load([param], mxfp4, np.float32, [sharding("x")], low_bit=True)
    assert {shard.data.shape for shard in w.scales.addressable_shards} == {(1, 96, 2)}
    np.testing.assert_array_equal(
        dequantise(jax.tree.map(np.asarray, w)), load([param], mxfp4, np.float32)[0]
    )


def test_a_byte_is_not_cut(folder):
    tensors = {
        "a.weight_packed": np.zeros((8, 2), np.int32), "a.weight_shape": np.array([8, 12]),
        "a.weight_scale": np.ones((8, 1), ml_dtypes.bfloat16),
    }  # fmt: skip
    checkpoint = open_checkpoint(str(folder(tensors, quantization_config=CT)))
    with pytest.raises(CheckpointError, match="4 devices would share a byte"):
        load(
            [Param((8, 12), (None, None), "a.weight")],
            checkpoint,
            np.float32,
            [sharding(None, "x")],
            low_bit=True,
        )


@pytest.mark.parametrize(
    "format", [FP8_BLOCK, INT8_CHANNEL, MXFP4, int4(64, zeros=True)], ids=lambda f: f.name
)
def test_finer_blocks_are_the_same_values(format):
    w = quantise(RNG.standard_normal((2, 160, 192)).astype(np.float32), format)
    rows, columns = format.block
    finer = reblocked(w, rows // 2 if rows > 1 else rows, columns // 2)
    assert finer.format != format or not columns
    np.testing.assert_array_equal(dequantise(finer), dequantise(w))
