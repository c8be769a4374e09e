"""Logits that are not finite end the request that has them, with an error, and touch nobody else."""

import jax.numpy as jnp
import pytest

from jaxserve.engine import CORRUPTED
from jaxserve.request import Request
from tests.engines import Traffic, around, complete, counted, greedy, with_weights

POISON = 300  # the token whose embedding is broken
PROMPT = [(i * 13 + 5) % 250 for i in range(40)]
MATES = {"short": PROMPT[:6], "same start": PROMPT[:20], "long": PROMPT}


@pytest.fixture(params=[jnp.nan, jnp.inf], ids=["nan", "inf"])
def runner(tiny, request):
    params = tiny.engine.runner.params
    return with_weights(tiny, params | {"embed": params["embed"].at[POISON].set(request.param)})


@pytest.fixture
def expected(tiny):
    clean = {name: complete(around(tiny), prompt).outputs[0].token_ids for name, prompt in MATES.items()}
    assert not any(POISON in tokens for tokens in clean.values())
    return clean


@pytest.mark.parametrize("at", [0, 9, 19, 30])  # in the prompt's first chunk, at its end, in a later chunk
@pytest.mark.parametrize("ahead", [True, False])
def test_a_poisoned_prompt_ends_alone(tiny, runner, expected, at, ahead):
    engine = around(tiny, runner, async_scheduling=ahead, pages=48)
    traffic = Traffic(engine)
    poisoned = [*PROMPT[:at], POISON, *PROMPT[at : at + 8]]
    for again in "12":
        traffic.add(Request("short" + again, MATES["short"], greedy()))
        traffic.add(Request("poisoned" + again, poisoned, greedy(n=2)))
        traffic.add(Request("same start" + again, MATES["same start"], greedy()))
        traffic.finish()
        traffic.add(Request("long" + again, MATES["long"], greedy()))
        traffic.finish()
    for name, tokens in expected.items():
        for again in "12":
            assert traffic.done[name + again].outputs[0].token_ids == tokens
    for again in "12":
        for choice in traffic.done["poisoned" + again].outputs:
            assert (choice.finish_reason, choice.token_ids, choice.text) == ("error", [], "")
        assert traffic.errors["poisoned" + again] == CORRUPTED
    assert counted(engine.metrics, "vllm:corrupted_requests_total") == 2
    assert counted(engine.metrics, "vllm:request_success_total", finished_reason="error") == 2


def test_a_poisonous_sample_ends_the_request_after_it(tiny, runner, expected):
    engine = around(tiny, runner)
    traffic = Traffic(engine)
    for name, prompt in MATES.items():
        traffic.add(Request(name, prompt, greedy()))
    traffic.add(Request("poisoned", PROMPT[:8], greedy(allowed_token_ids=[POISON])))
    traffic.finish()
    assert {name: traffic.done[name].outputs[0].token_ids for name in MATES} == expected
    (choice,) = traffic.done["poisoned"].outputs
    assert (choice.token_ids, choice.finish_reason) == ([POISON], "error")


def test_pages_of_a_poisoned_request_serve_whoever_has_them_next(tiny, runner, expected):
    engine = around(tiny, runner, pages=33, enable_prefix_caching=False)
    poisoned = [POISON] * 100
    assert complete(engine, poisoned).outputs[0].finish_reason == "error"
    for name, prompt in MATES.items():
        assert complete(engine, prompt).outputs[0].token_ids == expected[name]


def test_what_a_poisoned_request_computed_is_never_shared(tiny, runner):
    """Its prefix would be found again; the next one must be told the same, not be given broken pages."""
    engine = around(tiny, runner)
    poisoned = [*PROMPT[:10], POISON, *PROMPT[10:30]]
    for _ in range(3):
        output = complete(engine, poisoned)
        assert output.outputs[0].finish_reason == "error" and output.num_cached_tokens <= 8


def test_one_bad_choice_of_best_of_ends_the_request_once(tiny, runner):
    engine = around(tiny, runner)
    params = greedy(best_of=4, n=2, allowed_token_ids=[POISON])
    output = complete(engine, PROMPT[:9], params)
    assert [choice.finish_reason for choice in output.outputs] == ["error", "error"]
    assert counted(engine.metrics, "vllm:corrupted_requests_total") == 1
