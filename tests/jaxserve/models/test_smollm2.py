"""A real model: SmolLM2-135M-Instruct continues chats with the reference's tokens and probabilities."""

import json

import jax
import numpy as np
import pytest

from jaxserve.demo import demo_model
from jaxserve.errors import ConfigError
from jaxserve.models import ModelConfig, model_for
from jaxserve.weights import load, open_checkpoint
from tests.jaxserve.models.running import GOLDEN, Run

CHATS = json.loads((GOLDEN / "smollm2_135m_instruct" / "chat_greedy.json").read_text())["conversations"]
STEPS = max(len(chat["greedy_ids"]) for chat in CHATS)


@pytest.fixture(scope="module")
def run() -> Run:
    """Every chat a sequence of one batch."""
    try:
        path = demo_model()
    except ConfigError as why:
        pytest.skip(str(why))
    checkpoint = open_checkpoint(path)
    config = ModelConfig.from_hf(checkpoint.config)
    params = load(model_for(config).params(config), checkpoint, np.float32, progress=False)
    longest = max(len(chat["prompt_ids"]) for chat in CHATS) + STEPS
    return Run(config, params, sequences=len(CHATS), longest=longest)


@pytest.mark.supports("models", "SmolLM2-135M-Instruct (GGUF)")
def test_greedy_tokens_and_top_logprobs(run):
    logits = np.stack([run.step({b: chat["prompt_ids"]})[-1] for b, chat in enumerate(CHATS)])
    for step in range(STEPS):
        logprobs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
        for b, chat in enumerate(CHATS):
            if step < len(chat["greedy_ids"]):
                assert int(np.argmax(logits[b])) == chat["greedy_ids"][step], f"chat {b}, token {step}"
                top = chat["top5_ids"][step]
                np.testing.assert_allclose(logprobs[b, top], chat["top5_logprobs"][step], atol=2e-3)
        # A chat that ended goes on with anything, as the others' neighbour.
        logits = run.step(
            {b: (chat["greedy_ids"] + [0] * STEPS)[step : step + 1] for b, chat in enumerate(CHATS)}
        )
