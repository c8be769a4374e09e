"""The step for a TPU mesh that is not here: every operation becomes its kernel on each device's part."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from jaxserve.arrays import Arrays
from jaxserve.buckets import Bucket
from jaxserve.config import EngineConfig
from jaxserve.models import ModelConfig, model_for
from jaxserve.placement import placement
from jaxserve.step import Step
from jaxserve.topology import model_sizes
from sharding.mesh import Topology
from sharding.params import Param, stack_layers
from tests.pallas_kernels.conftest import tpu_compiler  # noqa: F401
from tests.tiny import tiny_config

SETTINGS = EngineConfig("tiny", max_num_seqs=16, block_size=128, dtype="bfloat16", kv_cache_dtype="bfloat16")
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
MIXTURE = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}


def lowered(hf: dict, topology: Topology, bucket: Bucket) -> str:
    """The program of a step, before XLA has seen it."""
    config = ModelConfig.from_hf(hf)
    params = model_for(config).params(config)
    params["layers"] = stack_layers(params["layers"])
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    where = placement(topology.mesh(model_sizes(config), devices), config, params, stacked=True)
    arrays = Arrays(SETTINGS, config, params, True, where)

    def shape(leaf, sharding):
        return jax.ShapeDtypeStruct(
            leaf.shape, jnp.dtype(getattr(leaf, "dtype", None) or "bfloat16"), sharding=sharding
        )

    weights = jax.tree.map(shape, params, where.params, is_leaf=lambda leaf: isinstance(leaf, Param))
    pool = arrays.pool_shapes(64)
    state = jax.tree.map(shape, jax.eval_shape(arrays._new_state), where.state)
    return Step(config, 128, where).lower(weights, pool, state, bucket).as_text()


@pytest.mark.parametrize(
    "arch, topology",
    [
        ("llama", Topology(data=2, tensor=2)),
        ("mixtral", Topology(expert=2, tensor=2)),
        ("mixtral", Topology(expert=1, tensor=4)),
    ],
)
def test_the_step_lowers_with_its_kernels(tpu_compiler, arch, topology):  # noqa: F811
    hf = tiny_config(arch, 1024, **WIDE | (MIXTURE if arch == "mixtral" else {}))
    text = lowered(hf, topology, Bucket(16, 16, 8))
    assert text.count("tpu_custom_call") >= (2 if arch == "llama" else 5)
    if arch == "llama":  # each device multiplies with its own part; only the logits are put together
        gathered = re.findall(r"stablehlo.all_gather.*?\) -> (\S+)", text, re.DOTALL)
        assert set(gathered) == {"tensor<16x1024xf32>"}
