"""The planner's count of experts that a step reads, against what routers of real models choose."""

import numpy as np
import pytest

from jaxserve.plan.cost import hot_experts
from tests.jaxserve.models.running import Run, golden_config, golden_params, golden_prompts


def measured(ids: np.ndarray, tokens: int, rng: np.random.Generator) -> float:
    """Experts that a random batch of the prompt's tokens reads in a layer, on average."""
    batches = [rng.choice(ids.shape[1], tokens, replace=False) for _ in range(200)]
    return float(np.mean([len(np.unique(layer[batch])) for batch in batches for layer in ids]))


@pytest.mark.parametrize("arch, least", [("deepseek_v3", 0.87), ("kimi_k2", 0.72)])
def test_experts_read_are_what_the_formula_says(arch, least):
    config = golden_config(arch)
    assert config.mixture
    prompt = next(p for p in golden_prompts(arch) if p["length"] == 130)
    inside = Run(config, golden_params(arch, config)).inside({0: prompt["ids"]})
    routing, rng = config.mixture.routing, np.random.default_rng(0)
    for tokens in (1, 2, 4, 8, 16, 32):
        found = measured(inside["router_experts"], tokens, rng)
        even = hot_experts(tokens, routing.experts, routing.top)
        assert least * even <= found <= even + 1e-9  # even routing reads most
        loads = [
            hot_experts(tokens, routing.experts, routing.top, list(row)) for row in inside["expert_loads"]
        ]
        assert found == pytest.approx(np.mean(loads), rel=0.06)


def test_even_loads_are_the_formula():
    assert hot_experts(8, 16, 4, [5] * 16) == pytest.approx(hot_experts(8, 16, 4))
    assert hot_experts(1, 256, 8) == pytest.approx(8) and hot_experts(1 << 12, 256, 8) == pytest.approx(256)
    assert hot_experts(128, 256, 8) == pytest.approx(251.6, abs=0.1)
    assert hot_experts(100, 4, 2, [1, 1, 0, 0]) == 2
