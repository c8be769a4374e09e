"""For a TPU that is not here: a group of layers updates its pages in place, and taking rows of them is little work.

The programs of a step are launched one after the other. What takes a group's rows is one of its own, that needs the
pages after that group and nothing later; what is shown here is that it does not copy them.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.arrays import Arrays
from jaxserve.buckets import Bucket
from jaxserve.config import EngineConfig
from jaxserve.layer_groups import layer_groups
from jaxserve.layered_step import LayeredStep
from jaxserve.models import ModelConfig, model_for
from jaxserve.placement import placement
from jaxserve.step import Step
from jaxserve.topology import model_sizes
from kv import wire
from sharding.mesh import Topology
from sharding.params import Param, stack_layers
from tests.pallas_kernels.conftest import tpu_compiler  # noqa: F401
from tests.sharding.test_tpu import WIDE
from tests.tiny import tiny_config

PAGES, ROWS = 2048, 256


@pytest.fixture(scope="module")
def programs(tpu_compiler):  # noqa: F811
    """(the groups' program, that which takes their rows, bytes of all pages on a device, bytes of the rows there)."""
    settings = EngineConfig(
        "tiny", max_num_seqs=1, block_size=128, dtype="bfloat16", kv_cache_dtype="bfloat16"
    )
    config = ModelConfig.from_hf(tiny_config("llama", 1024, layers=8, **WIDE))
    params = model_for(config).params(config)
    params["layers"] = stack_layers(params["layers"])
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[:2]
    where = placement(Topology(tensor=2).mesh(model_sizes(config), devices), config, params, stacked=True)
    arrays = Arrays(settings, config, params, True, where)

    def shape(leaf, sharding):
        return jax.ShapeDtypeStruct(
            leaf.shape, getattr(leaf, "dtype", None) or jnp.bfloat16, sharding=sharding
        )

    weights = jax.tree.map(shape, params, where.params, is_leaf=lambda leaf: isinstance(leaf, Param))
    state = jax.tree.map(shape, jax.eval_shape(arrays._new_state), where.state)
    pool = arrays.pool_shapes(PAGES)
    groups = layer_groups(weights["layers"], stacked=True, pieces=4)
    assert [group.program for group in groups] == [(0, 2)] * 4, "one program computes every group"
    lowered = LayeredStep(Step(config, 128, where), groups).lower(weights, pool, state, Bucket(256, 1, 64))
    here = NamedSharding(where.mesh, P())
    take = wire.take.lower(
        pool,
        jax.ShapeDtypeStruct((ROWS,), jnp.int32, sharding=here),
        jax.ShapeDtypeStruct((), jnp.int32, sharding=here),
        layers=2,
        latent=False,
        dtype="bfloat16",
    )
    size = pool.size * 2 // 2
    rows = 2 * ROWS * 2 * WIDE["num_key_value_heads"] * WIDE["head_dim"] * 2 // 2
    return lowered[(0, 2)].compile(), take.compile(), size, rows


def test_a_group_of_layers_updates_all_pages_in_place(programs):
    group, _, pages, _ = programs
    assert group.as_text().count("tpu_custom_call") >= 2, "attention and page writes run as kernels"
    assert group.memory_analysis().alias_size_in_bytes >= pages
    assert group.memory_analysis().temp_size_in_bytes < pages / 8 / 2, "a layer's pages are copied"


@pytest.mark.supports("disaggregation", "programs of layer groups, compiled for a TPU")
def test_rows_of_a_group_are_gathered_from_where_they_are(programs):
    _, take, _, rows = programs
    memory = take.memory_analysis()
    assert memory.output_size_in_bytes < 2 * rows
    assert memory.temp_size_in_bytes < 4 * rows, "pages are copied"
