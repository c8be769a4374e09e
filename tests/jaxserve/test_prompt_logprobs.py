"""What a request may ask to know of its prompt is what one forward pass over the whole prompt says."""

import jax
import numpy as np
import pytest

from jaxserve.request import Request
from tests.engines import Traffic, around, complete, counted, greedy
from tests.jaxserve.models.running import Run

PROMPT = [(i * i * 7 + 3) % 250 for i in range(70)]


@pytest.fixture(scope="module")
def forward(tiny):
    """(log-probabilities [T, V], hidden states [T, D]) of PROMPT."""
    inside = Run(tiny.model_config, tiny.engine.runner.params).inside({0: PROMPT})
    return np.asarray(jax.nn.log_softmax(inside["logits"])), inside["hidden"]


def assert_right(output, logprobs, wanted: int) -> None:
    length = len(output.prompt_token_ids)
    assert len(output.prompt_logprobs) == length and output.prompt_logprobs[0] is None
    for place in range(1, length):
        entries, row, token = output.prompt_logprobs[place], logprobs[place - 1], PROMPT[place]
        assert next(iter(entries)) == token, "its own first"
        top = np.argsort(-row)[:wanted].tolist()
        assert set(entries) == {token, *top}
        for other, entry in entries.items():
            assert entry.logprob == pytest.approx(float(row[other]), abs=1e-4)
            assert entry.rank == 1 + int(np.sum(row > row[other]))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [8, 24])
@pytest.mark.parametrize("length, max_tokens", [(1, 0), (2, 1), (23, 0), (70, 3), (70, 0)])
def test_they_are_right(tiny, forward, caching, budget, length, max_tokens):
    engine = around(tiny, enable_prefix_caching=caching, max_num_batched_tokens=budget)
    params = greedy(prompt_logprobs=4, max_tokens=max_tokens)
    for _ in range(2):  # the second time, the prompt could be found in the cache
        output = complete(engine, PROMPT[:length], params)
        assert_right(output, forward[0], 4)
        assert len(output.outputs[0].token_ids) == max_tokens
        assert output.outputs[0].finish_reason == "length"
    if caching and length == 70:
        assert complete(engine, PROMPT).num_cached_tokens == 68, "asking computed what others may share"


def test_preemption_does_not_spoil_them(tiny, forward):
    engine = around(tiny, pages=34)
    traffic = Traffic(engine)
    traffic.add(Request("first", PROMPT[:30], greedy(max_tokens=60)))
    traffic.add(Request("asked", PROMPT[:61], greedy(max_tokens=40, prompt_logprobs=1)))
    traffic.finish()
    assert counted(engine.metrics, "vllm:num_preemptions_total") > 0
    assert_right(traffic.done["asked"], forward[0], 1)


def test_only_who_asks_is_told_and_all_choices_share_it(tiny, forward):
    engine = around(tiny)
    traffic = Traffic(engine)
    traffic.add(Request("asked", PROMPT[:40], greedy(n=3, temperature=1.0, seed=1, prompt_logprobs=0)))
    traffic.add(Request("not asked", PROMPT[:40], greedy()))
    traffic.finish()
    assert_right(traffic.done["asked"], forward[0], 0)
    assert traffic.done["not asked"].prompt_logprobs is None


@pytest.mark.parametrize("budget", [8, 24])
def test_hidden_states_are_the_forward_pass(tiny, forward, budget):
    engine = around(tiny, max_num_batched_tokens=budget)
    for length in (70, 3, 33):
        output = complete(engine, PROMPT[:length], greedy(max_tokens=0), hidden_states=True)
        assert output.hidden_states is not None and output.hidden_states.dtype == np.float32
        np.testing.assert_allclose(output.hidden_states, forward[1][:length], atol=2e-4)


def test_log_probabilities_of_samples_are_the_models_own(tiny):
    """Before temperature, penalties and masks."""
    params = greedy(
        temperature=0.7,
        seed=3,
        top_k=5,
        logit_bias={9: 4.0},
        frequency_penalty=1.0,
        logprobs=20,
        max_tokens=6,
    )
    output = complete(around(tiny), PROMPT[:20], params)
    choice = output.outputs[0]
    tokens = PROMPT[:20] + choice.token_ids
    logits = Run(tiny.model_config, tiny.engine.runner.params).step({0: tokens})
    logprobs = np.asarray(jax.nn.log_softmax(logits))[19:-1]
    assert len(choice.logprobs) == 6
    for entries, row, token in zip(choice.logprobs, logprobs, choice.token_ids, strict=True):
        assert set(entries) == {token, *np.argsort(-row)[:20].tolist()}
        for other, entry in entries.items():
            assert entry.logprob == pytest.approx(float(row[other]), abs=1e-4)
            assert entry.decoded_token == around(tiny).tokenizer.decode([other], skip_special_tokens=False)
    total = sum(
        entries[token].logprob for entries, token in zip(choice.logprobs, choice.token_ids, strict=True)
    )
    assert choice.cumulative_logprob == pytest.approx(total)
