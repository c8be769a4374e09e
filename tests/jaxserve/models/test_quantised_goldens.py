"""Quantised checkpoints give the logits and the greedy tokens that their reference implementations computed."""

import numpy as np
import pytest

from jaxserve.models import ModelConfig, model_for
from jaxserve.weights import load, open_checkpoint
from tests.jaxserve.models.running import GOLDEN, Run, golden_prompts

ARCHS = ["qwen2_awq_int4", "qwen2_gptq_int4"]


@pytest.mark.parametrize("arch", [pytest.param(a, marks=pytest.mark.supports("models", a)) for a in ARCHS])
def test_logits_and_greedy_tokens(arch):
    checkpoint = open_checkpoint(str(GOLDEN / arch))
    config = ModelConfig.from_hf(checkpoint.config)
    params = load(model_for(config).params(config), checkpoint, np.float32, progress=False)
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
