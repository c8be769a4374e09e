"""Linear layers and norms compute in float32 whatever the weights are stored in."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.linear import linear, linear_f32
from jaxserve.layers.norm import rms_norm

RNG = np.random.default_rng(0)


def draw(*shape: int, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def test_linear_takes_weights_as_stored():
    x, w, bias = draw(5, 8), draw(3, 8), draw(3)
    np.testing.assert_allclose(
        linear(x, w, bias), np.asarray(x) @ np.asarray(w).T + np.asarray(bias), rtol=1e-5
    )


def test_bfloat16_is_summed_in_float32():
    x, w = jnp.ones((1, 4096), jnp.bfloat16), jnp.full((2, 4096), 1 / 256, jnp.bfloat16)
    assert linear(x, w).dtype == jnp.bfloat16 and linear_f32(x, w).dtype == jnp.float32
    np.testing.assert_array_equal(linear_f32(x, w), 16.0)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(offset):
    x, w = draw(4, 2, 8), draw(8)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * (np.asarray(w) + offset)
    np.testing.assert_allclose(rms_norm(x, w, 1e-5, offset), expected, rtol=1e-5)


def test_rms_norm_of_bfloat16_rounds_once_at_the_end():
    x, w = draw(4, 64, dtype=jnp.bfloat16), draw(64, dtype=jnp.bfloat16)
    expected = rms_norm(x.astype(jnp.float32), w.astype(jnp.float32), 1e-5).astype(jnp.bfloat16)
    np.testing.assert_array_equal(rms_norm(x, w, 1e-5), expected)
