"""Formats: codes, scales and values equal published ones byte for byte, on numpy and on JAX arrays."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import elements, formats
from pallas_kernels.formats import FORMATS, FP8_BLOCK, MXFP4, NVFP4, QTensor, dequantise, int4, quantise

GOLDEN = Path(__file__).parents[1] / "golden" / "formats"
ON = {"numpy": np.asarray, "jax": jnp.asarray}
E4M3 = ml_dtypes.float8_e4m3fn
SMALL = {"e2m1": "float4_e2m1fn", "e3m2": "float6_e3m2fn", "e2m3": "float6_e2m3fn"}


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


def equal(got, want) -> None:
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def nibbles(codes: np.ndarray) -> np.ndarray:
    return codes[..., 0::2] | codes[..., 1::2] << 4


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("which", ["w0", "w1", "w2", "w3"])
def test_fp8_blocks_count_from_the_corner_and_may_be_cut(on, which):
    z = golden("fp8_block128")
    w = quantise(ON[on](z[f"{which}.source"]), FP8_BLOCK)
    equal(w.codes, z[f"{which}.bytes"])
    equal(w.scales, z[f"{which}.scale_inv"])
    equal(dequantise(w), z[f"{which}.dequant"])


@pytest.mark.parametrize("on", ON)
def test_fp8_activations_per_token_and_128_columns(on):
    z = golden("fp8_block128")
    w = quantise(ON[on](z["act.source"]), formats.Format("act", "e4m3", (1, 128)))
    equal(w.codes, z["act.bytes"])
    equal(w.scales, z["act.scale"])
    equal(dequantise(w), z["act.dequant"])


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("which", ["sym", "asym", "ct"])
def test_int4_groups_of_128(on, which):
    z = golden("int4")
    format = int4(128, zeros=which == "asym", scale=jnp.bfloat16 if which == "ct" else jnp.float16)
    w = quantise(ON[on](z["source"]), format)
    want = z["ct.codes"] + np.int8(8) if which == "ct" else z[f"{which}.q"]
    equal(w.codes, nibbles(want.astype(np.uint8)))
    scales = z["ct.scale"] if which == "ct" else z[f"{which}.scales"]
    equal(np.asarray(w.scales).astype(np.float32), scales.astype(np.float32))
    if which == "asym":
        equal(w.zeros, z["asym.zeros"])
    if which == "ct":  # packed the way compressed-tensors packs, eight codes an int32
        equal(w.codes, z["ct.weight_packed"])
    equal(dequantise(w), z[f"{which}.dequant"])


@pytest.mark.parametrize("on", ON)
def test_mxfp4(on):
    z = golden("mxfp4")
    w = quantise(ON[on](z["source"]), MXFP4)
    equal(w.codes, z["blocks"].reshape(40, 64))
    equal(w.scales, z["scales"])
    equal(dequantise(w), z["dequant"])


def test_mxfp4_every_code_with_every_scale():
    z = golden("mxfp4")
    codes, scales = z["exhaustive_blocks"], z["exhaustive_scales"][:, None]
    with np.errstate(over="ignore"):  # 2^126 and 2^127 times the largest codes
        equal(dequantise(QTensor(codes, scales, format=MXFP4)), z["exhaustive_dequant"])
    normal = scales[:, 0] > 2
    got = dequantise(QTensor(jnp.asarray(codes), jnp.asarray(scales), format=MXFP4))
    equal(got[normal], z["exhaustive_dequant"][normal])
    nan = QTensor(codes[:1], np.array([[255]], np.uint8), format=MXFP4)
    assert np.isnan(dequantise(nan)).all()


@pytest.mark.parametrize("on", ON)
def test_nvfp4(on):
    z = golden("nvfp4")
    w = quantise(ON[on](z["source"]), NVFP4)
    equal(w.codes, z["packed"])
    equal(w.scales, z["scale_e4m3_bytes"])
    equal(w.tensor_scale, z["scale_2"])
    equal(dequantise(w), z["dequant"])


@pytest.mark.parametrize("on", ON)
def test_element_tables(on):
    tables = golden("tables")
    codes = np.arange(16, dtype=np.uint8)
    w = QTensor(ON[on](nibbles(np.tile(codes, 2))[None]), ON[on](np.array([[127]], np.uint8)), format=MXFP4)
    equal(dequantise(w)[0, :16], tables["e2m1"])
    w = QTensor(
        ON[on](np.arange(256, dtype=np.uint8).view(E4M3)[None]),
        ON[on](np.ones((1, 1), np.float32)),
        format=formats.FP8_CHANNEL,
    )
    np.testing.assert_array_equal(dequantise(w)[0], tables["e4m3fn"])


@pytest.mark.parametrize("kind, name", SMALL.items())
def test_small_floats_are_those_of_ml_dtypes(kind, name):
    codes = np.arange(2 ** elements.BITS[kind], dtype=np.uint8)
    equal(elements.values(kind), codes.view(getattr(ml_dtypes, name)).astype(np.float32))


@settings(max_examples=30)
@given(st.lists(st.floats(-7.5, 7.5, width=32), min_size=32, max_size=32))
def test_rounding_is_that_of_ml_dtypes(values):
    x = np.array([values], np.float32)
    for kind, name in SMALL.items():
        clipped = np.clip(x, -elements.LARGEST[kind], elements.LARGEST[kind])
        codes = clipped.astype(getattr(ml_dtypes, name)).view(np.uint8)
        for xp in (np, jnp):
            equal(elements.unpack(xp, elements.encode(xp, xp.asarray(x), kind), elements.BITS[kind]), codes)
    x[0, 0] = 4.0  # the scale of the block is 1 when its largest value is from 4 up to 8
    equal(quantise(x, MXFP4).codes, nibbles(np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)))
    x = np.clip(x * 64, -448, 448)
    x[0, 1] = 448
    equal(quantise(x, formats.FP8_CHANNEL).codes, x.astype(E4M3))
    x[0, 1] = 57344
    equal(quantise(x, formats.E5M2_CHANNEL).codes, x.astype(ml_dtypes.float8_e5m2))


@pytest.mark.parametrize(
    "format, exponent",
    [(formats.MXFP8, 8), (formats.MXFP8_E5M2, 15), (formats.MXFP6_E3M2, 4), (formats.MXFP6_E2M3, 2)],
)
def test_mx_formats_divide_by_a_power_of_two_and_round_as_ml_dtypes(format, exponent):
    x = np.random.default_rng(1).normal(size=(16, 128)).astype(np.float32) ** 5
    w = quantise(x, format)
    blocks = x.reshape(16, 4, 32)
    scale = np.exp2(np.floor(np.log2(np.abs(blocks).max(-1, keepdims=True))) - exponent).astype(np.float32)
    equal(w.scales, (np.log2(scale[..., 0]) + 127).astype(np.uint8))
    largest = elements.LARGEST[format.codes]
    name = SMALL.get(format.codes) or {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}[format.codes]
    rounded = np.clip(blocks / scale, -largest, largest).astype(getattr(ml_dtypes, name)).astype(np.float32)
    equal(dequantise(w), (rounded * scale).reshape(16, 128))
    assert w.nbytes == x.size * format.bits / 8


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("format", formats.GGUF, ids=lambda f: f.name)
def test_gguf_blocks(on, format):
    z, kind = golden("gguf_blocks"), format.name.upper()
    blocks = z[f"{kind}.bytes"].reshape(6, 512 // format.block[1], -1)
    w = QTensor(ON[on](blocks), format=format)
    assert w.shape == (6, 512) and w.nbytes == 6 * 512 * format.bits / 8
    equal(dequantise(w), z[f"{kind}.dequant"])
    if format.block[1] == 32:
        equal(quantise(ON[on](z["source"]), format).codes, blocks)
    else:
        with pytest.raises(ValueError, match="is read and not written"):
            quantise(ON[on](z["source"]), format)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_inside_jit_the_bytes_are_the_same(format):
    x = np.random.default_rng(0).normal(size=(2, 40, 256)).astype(np.float32)
    x[0, :8] = 0
    host, device = quantise(x, format), jax.jit(quantise, static_argnums=1)(x, format)
    jax.tree.map(equal, device, host)
    equal(jax.jit(dequantise)(device), dequantise(host))
    assert host.shape == x.shape
    assert host.nbytes >= x.size * format.bits / 8
    one = jax.tree.map(lambda leaf: leaf[1], host)  # a stack is sliced by its leaves
    equal(dequantise(one), dequantise(host)[1])


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_zero_blocks_are_zero_and_what_is_not_finite_poisons_its_block_only(format):
    x = np.ones((256, 256), np.float32)
    x[:128] = 0
    x[200, 3], x[201, 130] = np.nan, -np.inf
    for on in ON.values():
        got = np.asarray(dequantise(quantise(on(x), format)))
        assert np.isnan(got[200, 3]) and np.isnan(got[201, 130])
        if format.block[0]:  # what poisons a matrix with one scale is all of it
            assert (got[:128] == 0).all()
        np.testing.assert_allclose(got[128] if format.block[0] == 1 else 1, 1, rtol=0.07)


@pytest.mark.parametrize("group", [32, 128])
def test_integers_with_zero_points_reach_both_ends(group):
    x = np.random.default_rng(2).normal(3, 1, (8, 256)).astype(np.float32)
    for format in (int4(group, zeros=True), formats.Format("int8", "int8", (1, group), zeros=True)):
        got = dequantise(quantise(x, format))
        step = np.repeat((quantise(x, format).scales).astype(np.float32), group, axis=1)
        assert (np.abs(got - x) <= step * 0.51 + np.abs(x) * 2**-8).all()


def test_groups_that_do_not_divide_the_columns_are_refused():
    with pytest.raises(ValueError, match=r"groups 32 columns, and D=40 .* pad"):
        quantise(np.ones((4, 40), np.float32), MXFP4)
