"""A request's tokens, text and log-probabilities are those of the request alone, whatever else goes on."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.build import Built
from jaxserve.request import CompletionOutput, Request, RequestOutput
from jaxserve.sampling.params import SamplingParams
from tests.engines import Traffic, around, complete, counted, greedy
from tests.jaxserve.models.running import golden_prompts

LONG = [(i * i * 37 + 11 * i) % 250 for i in range(90)]


def drawn(seed: int, **fields) -> SamplingParams:
    return greedy(**{"temperature": 1.0, "seed": seed, "max_tokens": 20} | fields)


KINDS: list[tuple[list[int], SamplingParams]] = [
    (LONG[:5], greedy(max_tokens=30)),
    (LONG[:40], greedy(max_tokens=12, logprobs=3)),
    (LONG[:41], drawn(1)),
    (LONG[:80], drawn(2, top_p=0.9, top_k=40, logprobs=0)),
    (LONG[:23], drawn(3, min_p=0.05, repetition_penalty=1.4, presence_penalty=0.5, max_tokens=40)),
    ([*LONG[:23], 1, 2, 3], greedy(frequency_penalty=1.5, repetition_penalty=1.2, max_tokens=40)),
    ([9] * 30, drawn(4, logit_bias={5: 3.0, 6: -100.0}, bad_words=["a", "bc"])),
    ([9] * 31, drawn(5, allowed_token_ids=list(range(97, 123)), stop=["q", "xyz"], max_tokens=60)),
    (LONG[:16], drawn(6, ignore_eos=False, min_tokens=15, max_tokens=25, logit_bias={257: 6.0})),
    (LONG[:33], drawn(7, n=3, logprobs=1, max_tokens=9)),
    (LONG[:17], drawn(8, n=2, best_of=4, max_tokens=9)),
    (LONG[:77], greedy(prompt_logprobs=2, max_tokens=5)),
    (LONG[:50], greedy(prompt_logprobs=0, max_tokens=0)),
    (LONG, drawn(-9, prompt_logprobs=1, logprobs=2, stop_token_ids=[*range(0, 250, 9)], max_tokens=None)),
]  # fmt: skip


@functools.cache
def _plain(built_id: int, kind: int) -> RequestOutput:
    return complete(
        around(BUILT[built_id], async_scheduling=False, enable_prefix_caching=False), *KINDS[kind]
    )


BUILT = {}


@pytest.fixture(scope="module", autouse=True)
def forgotten():
    yield
    BUILT.clear()
    _plain.cache_clear()


def alone(built: Built) -> Callable[[int], RequestOutput]:
    """What a kind of request gets when it is alone: one step at a time, nothing cached."""
    BUILT[id(built)] = built
    return functools.partial(_plain, id(built))


@pytest.fixture
def plain(tiny):
    return alone(tiny)


def assert_same(got: RequestOutput, expected: RequestOutput) -> None:
    assert got.prompt_token_ids == expected.prompt_token_ids
    assert_same_logprobs(got.prompt_logprobs, expected.prompt_logprobs)
    assert len(got.outputs) == len(expected.outputs)
    for a, b in zip(got.outputs, expected.outputs, strict=True):
        assert_same_choice(a, b)


def assert_same_choice(a: CompletionOutput, b: CompletionOutput) -> None:
    assert (a.index, a.token_ids, a.text) == (b.index, b.token_ids, b.text)
    assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
    assert_same_logprobs(a.logprobs, b.logprobs)


def assert_same_logprobs(a, b) -> None:
    assert (a is None) == (b is None)
    for x, y in zip(a or [], b or [], strict=True):
        assert (x or {}).keys() == (y or {}).keys()
        for token, entry in (x or {}).items():
            assert entry.logprob == pytest.approx(y[token].logprob, abs=1e-4)
            assert (entry.rank, entry.decoded_token) == (y[token].rank, y[token].decoded_token)


@dataclass(frozen=True)
class Arrival:
    """One request of random traffic."""

    kind: int
    wait: int  # steps after the request before it
    priority: int
    salt: str
    patience: int | None  # steps after which it is aborted


ARRIVALS = st.builds(
    Arrival,
    kind=st.integers(0, len(KINDS) - 1),
    wait=st.integers(0, 4),
    priority=st.integers(-1, 1),
    salt=st.sampled_from(["", "", "other"]),
    patience=st.none() | st.none() | st.integers(0, 12),
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    arrivals=st.lists(ARRIVALS, min_size=2, max_size=9),
    seqs=st.sampled_from([1, 3, 8]),
    budget=st.sampled_from([8, 13, 24]),
    pages=st.sampled_from([33, 40, 160]),
    ahead=st.booleans(),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_random_traffic(tiny, plain, arrivals, seqs, budget, pages, ahead, caching, policy):
    engine = around(
        tiny, pages=pages, max_num_seqs=seqs, max_num_batched_tokens=budget, async_scheduling=ahead,
        enable_prefix_caching=caching, scheduling_policy=policy,
    )  # fmt: skip
    traffic = Traffic(engine)
    deadlines: dict[str, int] = {}
    for i, arrival in enumerate(arrivals):
        for _ in range(arrival.wait):
            step(traffic, deadlines)
        prompt, params = KINDS[arrival.kind]
        priority = arrival.priority if policy == "priority" else 0
        traffic.add(Request(str(i), prompt, params, priority=priority, cache_salt=arrival.salt))
        if arrival.patience is not None:
            deadlines[str(i)] = arrival.patience
    while deadlines:
        step(traffic, deadlines)
    done = traffic.finish()
    for i, arrival in enumerate(arrivals):
        if str(i) in done or arrival.patience is None:
            assert_same(done[str(i)], plain(arrival.kind))


def step(traffic: Traffic, deadlines: dict[str, int]) -> None:
    traffic.step()
    for request_id in list(deadlines):
        deadlines[request_id] -= 1
        if deadlines[request_id] < 0:
            del deadlines[request_id]
            traffic.abort(request_id)


WAYS = {
    "chunked": {"max_num_batched_tokens": 8},
    "crowded": {},
    "one_at_a_time": {"max_num_seqs": 1},
    "preempted": {"pages": 40},
    "read_at_once": {"async_scheduling": False},
    "not_cached": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_request_at_once(tiny, way):
    every_kind_at_once(tiny, way)


@pytest.mark.parametrize("way", ["chunked", "preempted"])
@pytest.mark.parametrize("arch", ["deepseek_v3", "gpt_oss"])
def test_every_kind_with_experts(golden, arch, way):
    """And with a latent cache, or with sinks and windows."""
    every_kind_at_once(golden(arch), way)


def every_kind_at_once(built: Built, way: str) -> None:
    engine, plain = around(built, **WAYS[way]), alone(built)
    traffic = Traffic(engine)
    for again in range(2):  # the second time with what the first has left in the cache
        for kind, (prompt, params) in enumerate(KINDS):
            traffic.add(Request(f"{kind} {again}", prompt, params))
        traffic.finish()
    for kind in range(len(KINDS)):
        for again in range(2):
            assert_same(traffic.done[f"{kind} {again}"], plain(kind))
    # That it was the way it is called:
    preemptions = counted(engine.metrics, "vllm:num_preemptions_total")
    hits = counted(engine.metrics, "vllm:prefix_cache_hits_total")
    assert (preemptions > 0) == (way == "preempted")
    assert (hits > 0) == (way != "not_cached")
    cached = traffic.done["3 1"].num_cached_tokens
    assert cached == (0 if way == "not_cached" else 76) or way == "preempted"


@pytest.mark.parametrize("arch", ["deepseek_v3", "gpt_oss"])
def test_goldens_are_served(golden, arch):
    """The engine gives the tokens of the reference implementation: in chunks, side by side, from cached prefixes."""
    engine = around(golden(arch), max_num_batched_tokens=8)
    prompts = [p for p in golden_prompts(arch) if p["length"] < 100]
    traffic = Traffic(engine)
    for again in range(2):
        for p in prompts:
            traffic.add(Request(f"{p['length']} {again}", p["ids"], greedy(max_tokens=24)))
        traffic.finish()
    for p in prompts:
        for again in range(2):
            assert list(traffic.done[f"{p['length']} {again}"].outputs[0].token_ids) == p["greedy"]
    assert traffic.done["37 1"].num_cached_tokens == 36


def test_the_kinds_show_what_they_are_for(plain):
    """Were no stop string ever met, no end of sequence held back, the comparison would say nothing of them."""
    reasons = {kind: plain(kind).outputs[0] for kind in range(len(KINDS))}
    assert reasons[7].stop_reason in ("q", "xyz")
    assert reasons[8].finish_reason == "stop" and len(reasons[8].token_ids) > 15
    assert isinstance(reasons[13].stop_reason, int)
    assert len({tuple(choice.token_ids) for choice in plain(9).outputs}) == 3
    assert plain(12).outputs[0].token_ids == [] and plain(12).outputs[0].finish_reason == "length"
