"""Quantised checkpoints give the logits and the greedy tokens that their reference implementations computed."""

import jax
import numpy as np
import pytest

from jaxserve.models import ModelConfig, model_for
from jaxserve.weights import load, open_checkpoint
from pallas_kernels.formats import QTensor
from tests.jaxserve.models.running import GOLDEN, Run, golden_prompts, stacked

ARCHS = ["qwen2_awq_int4", "qwen2_gptq_int4", "kimi_k2_int4_ct", "deepseek_v3_fp8", "gpt_oss_mxfp4"]


def opened(arch: str, **how):
    checkpoint = open_checkpoint(str(GOLDEN / arch))
    config = ModelConfig.from_hf(checkpoint.config)
    return config, load(model_for(config).params(config), checkpoint, np.float32, progress=False, **how)


@pytest.mark.parametrize("arch", [pytest.param(a, marks=pytest.mark.supports("models", a)) for a in ARCHS])
def test_logits_and_greedy_tokens(arch):
    config, params = opened(arch)
    expected = np.load(GOLDEN / arch / "logits.npz")
    for prompt in golden_prompts(arch):
        run, length = Run(config, params), prompt["length"]
        logits = run.step({0: prompt["ids"]})
        np.testing.assert_allclose(logits, expected[f"logits_{length}"], rtol=1e-4, atol=5e-4)
        for i, token in enumerate(prompt["greedy"]):
            assert int(np.argmax(logits[-1])) == token
            if i + 1 < len(prompt["greedy"]):
                logits = run.step({0: [token]})
                want = expected[f"greedy_logits_{length}"][i + 1]
                np.testing.assert_allclose(logits[0], want, rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize(
    "arch, stack", [(a, False) for a in ARCHS] + [("gpt_oss_mxfp4", True), ("deepseek_v3_fp8", True)]
)
def test_weights_that_stay_in_low_bits_give_the_same(arch, stack):
    config, params = opened(arch, low_bit=True)
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QTensor))
    assert sum(isinstance(leaf, QTensor) for leaf in leaves) >= 2 * config.num_layers
    run = Run(config, stacked(params) if stack else params, stack=stack)
    prompt = next(p for p in golden_prompts(arch) if p["length"] == 37)
    want = np.load(GOLDEN / arch / "logits.npz")["logits_37"]
    np.testing.assert_allclose(run.step({0: prompt["ids"]}), want, rtol=1e-4, atol=5e-4)
