"""Packed weights on a mesh: each device multiplies its rows, or its columns of which the sums are added."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxserve.weights.packing import _divided
from pallas_kernels.formats import FORMATS, quantise
from pallas_kernels.matmul import matmul as whole
from sharding.kernels import matmul
from sharding.mesh import ModelSizes, Topology
from sharding.params import Param
from sharding.rules import spec

MESH = Topology(tensor=4).mesh(ModelSizes("tiny", 4, 2, 256, 256))


@pytest.mark.parametrize("format", ["int8_channel", "fp8_block", "int4_64", "nvfp4"])
@pytest.mark.parametrize("axes", [("ffn", None), (None, "ffn"), ("kv_heads", None)], ids=str)
def test_a_packed_weight_gives_what_it_gives_on_one_device(format, axes):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((256, 256), np.float32)
    w, x = quantise(values, FORMATS[format]), jnp.asarray(rng.standard_normal((5, 256), np.float32))
    expected = whole(x, jax.tree.map(jnp.asarray, w))
    param = Param((256, 256), axes, "w")
    placed = _divided(lambda index: w, (), NamedSharding(MESH, spec(MESH, param.shape, axes)), param)
    ways = 2 if axes[0] == "kv_heads" else 4
    with jax.set_mesh(MESH):
        text = jax.jit(matmul).lower(x, placed).compile()
        found = text(x, placed)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
    assert found.sharding.shard_shape(found.shape) == (5, 256 if axes[0] is None else 256 // ways)
    assert ("all-reduce" in (text.as_text() or "")) == (axes[1] == "ffn")
