"""A cache in low bits: what it costs, how many bytes it takes, and that a conversation stays as good as it grows."""

import jax
import numpy as np
import pytest

from jaxserve.arrays import Arrays
from jaxserve.config import EngineConfig
from jaxserve.models import model_for
from pallas_kernels.pages import ScaledPages
from tests.jaxserve.models.running import GOLDEN, Run, golden_config, golden_params, golden_prompts

# Of logits that spread over some 3 units: mean of the differences from those of a float32 cache. A code of E4M3 is
# off by 2 % on average, and in mixtures some tokens then go to other experts.
ERRORS = {
    "llama": {"fp8_e4m3": 0.2, "fp8_e5m2": 0.4, "int8": 0.05, "int4": 0.6},
    "deepseek_v3": {"fp8_e4m3": 0.5, "fp8_e5m2": 0.9, "int8": 0.2, "int4": 1.2},
}
LONGEST = 130  # of the goldens' prompts


@pytest.mark.parametrize("arch", ERRORS)
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "int8", "int4"])
def test_logits_are_near_those_of_a_plain_cache(arch, dtype):
    """In chunks, so that most of what is attended to comes out of pages; the last third no worse than the first."""
    config = golden_config(arch)
    run = Run(config, golden_params(arch, config), cache=dtype)
    ids = next(p["ids"] for p in golden_prompts(arch) if p["length"] == LONGEST)
    got = np.concatenate([run.step({0: part}) for part in (ids[:50], ids[50:90], ids[90:])])
    off = np.abs(got - np.load(GOLDEN / arch / "logits.npz")[f"logits_{LONGEST}"]).mean(axis=-1)
    assert 1e-4 < off.mean() < ERRORS[arch][dtype]
    assert off[90:].mean() < 2 * off[:50].mean()
    assert all(isinstance(pages, ScaledPages) for pages in run.pool)


@pytest.mark.parametrize("stack", [False, True])
def test_a_stack_of_layers_has_a_stack_of_scales(stack):
    config = golden_config("deepseek_v3")
    arrays = Arrays(EngineConfig("m", kv_cache_dtype="int8", block_size=8), config, {}, stack)
    pool = arrays.pool(3)
    layers = config.num_layers
    values, scales = (x.shape for x in jax.tree.leaves(pool if stack else pool[0]))
    lead = (layers, 3) if stack else (3,)
    assert values == (*lead, *model_for(config).cache_shape(config, 8)) and scales == (*lead, 2, 4)
    assert arrays.page_bytes * 3 == sum(x.nbytes for x in jax.tree.leaves(pool))
