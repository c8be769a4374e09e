"""matmul: its definition by hand, its price, and what the TPU kernel refuses and how it sees rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import chip, formats
from pallas_kernels.formats import FORMATS, dequantise, quantise
from pallas_kernels.matmul import cases, matmul, reference, tpu
from pallas_kernels.op import Unfit


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_the_definition_multiplies_by_what_the_codes_stand_for(format):
    (x, w), options = cases.Case(3, 40, 256, format, layers=2).call(jnp.float32)
    values = dequantise(jax.tree.map(np.asarray, w))
    want = np.asarray(x, np.float64) @ values[1].T.astype(np.float64)
    np.testing.assert_allclose(matmul(x, w, **options), want, rtol=1e-4, atol=1e-5)
    alone = jax.tree.map(lambda leaf: leaf[0], w)
    np.testing.assert_allclose(matmul(x, alone), np.asarray(x) @ values[0].T, rtol=1e-4, atol=1e-5)


def test_the_price_is_the_weight_as_stored():
    t, f, d = 64, 256, 512
    rows = t * (d + f) * 2
    for format, weight in (
        (None, f * d * 2),
        (formats.FP8_BLOCK, f * d + 2 * 4 * 4),
        (formats.MXFP4, f * d // 2 + f * d // 32),
        (formats.NVFP4, f * d // 2 + f * d // 16 + 4),
        (formats.int4(128, zeros=True), f * d // 2 + f * d // 128 * 3),
    ):
        for layers in (None, 3):
            args, options = cases.Case(t, f, d, format, layers).shapes(jnp.bfloat16)
            assert reference.cost(*args, **options) == (2 * t * f * d, weight + rows)


@pytest.mark.parametrize(
    "case, dtype, words",
    [
        (cases.Case(8, 128, 256, formats.FP8_BLOCK), jnp.float32, "rows must be bfloat16"),
        (cases.Case(8, 128, 192, formats.FP8_BLOCK), jnp.bfloat16, "D=192 must be a multiple of 128"),
        (cases.Case(8, 128, 384, formats.MXFP4), jnp.bfloat16, "D=384 must be a multiple of 256"),
        (cases.Case(8, 128, 256, formats.Format("odd", "e4m3", (64, 64))), jnp.bfloat16, "only 128 x 128"),
        (cases.Case(8, 128, 256, formats.E5M2_CHANNEL), jnp.bfloat16, "e5m2_channel: codes of e4m3, "),
        (cases.Case(8, 128, 256, formats.MXFP8), jnp.bfloat16, "only 128 x 128"),
        (
            cases.Case(8, 128, 256, formats.int4(64, scale=jnp.float16)),
            jnp.bfloat16,
            "float16 scales; store the scales as bfloat16",
        ),
    ],
)
def test_what_does_not_fit_is_refused(case, dtype, words):
    args, options = case.shapes(dtype)
    with pytest.raises(Unfit, match=words):
        jax.eval_shape(partial(tpu.matmul, **options), *args)


@pytest.mark.parametrize("name", ["v6e", "tpu7x"])
@pytest.mark.parametrize(
    "format", ["fp8_block", "fp8_channel", "int4_128", "int4_128_zeros", "int4_32_zeros", "mxfp4", "nvfp4"]
)
def test_kernels_for_chips_with_deep_matrix_units_give_the_same(monkeypatch, name, format):
    (x, w), options = cases.Case(5, 144, 512, FORMATS[format], layers=2).call(jnp.bfloat16)
    monkeypatch.setattr(chip, "ambient", lambda: chip.CHIPS[name])
    with pltpu.force_tpu_interpret_mode():
        got = jax.jit(partial(tpu.matmul, **options))(x, w)
    want = np.asarray(matmul.reference(x, w, **options), np.float32)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=1e-2, atol=1e-2)


def test_quantised_and_plain_weights_meet_in_one_function():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 256)), jnp.float32)
    w = np.random.default_rng(1).normal(size=(32, 256)).astype(np.float32)
    q = jax.tree.map(jnp.asarray, quantise(w, formats.INT8_CHANNEL))
    np.testing.assert_allclose(matmul(x, q), matmul(x, jnp.asarray(w)), atol=0.5)
