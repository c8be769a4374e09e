"""The router's decisions by themselves: costs, choice, breaker, budget, splitting, roles, addresses, events."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import ConfigError
from jaxserve.pace import Pace
from kv import KVCache
from kv.events import Events, Gap
from server.feed import Reader
from server.router.breaker import FAILURES, FIRST_REST, Breaker, Budget
from server.router.config import RouterConfig
from server.router.cost import Prediction, Standing, choose, predict
from server.router.discovery import Addresses
from server.router.follow import take
from server.router.planner import Demand, busiest, next_move
from server.router.prompt_tokens import page_names
from server.router.split import reason_to_split
from server.router.worker import Ticket, Worker

PACE = Pace(0.02, 0.001, 0.0005)


def standing(**fields) -> Standing:
    idle = {"backlog": 0.0, "decoding": 0, "requests": 0, "max_num_seqs": 8, "step_tokens": 512}
    return Standing(PACE, **{**idle, **fields})  # type: ignore[arg-type]


@given(
    backlog=st.integers(0, 5000), prompt=st.integers(1, 5000), hit=st.integers(0, 5000), more=st.integers(1, 2000),
    decoding=st.integers(0, 8), requests=st.integers(0, 20),
)  # fmt: skip
def test_waiting_costs_and_what_is_cached_saves(backlog, prompt, hit, more, decoding, requests):
    hit = min(hit, prompt - 1)
    here = standing(backlog=backlog, decoding=decoding, requests=requests)
    cost = predict(here, prompt, hit, 50)
    assert predict(here, prompt + more, hit, 50).ttft > cost.ttft
    assert (
        predict(standing(backlog=backlog + more, decoding=decoding, requests=requests), prompt, hit, 50).ttft
        > cost.ttft
    )
    assert predict(here, prompt, min(hit + more, prompt - 1), 50).ttft <= cost.ttft
    assert 0 < cost.ttft < cost.seconds


def test_a_cached_prompt_is_worth_a_queue_of_as_many_tokens():
    cached = predict(standing(backlog=900), 1000, 900, 10)
    idle = predict(standing(), 1000, 0, 10)
    assert cached.ttft == pytest.approx(idle.ttft)


def test_without_a_free_place_the_wait_is_for_answers_to_end():
    full = predict(standing(decoding=8, requests=10), 10, 0, 100)
    assert full.ttft > 3 * 100 * PACE.seconds(0, 8) / 8


@given(
    seconds=st.lists(st.floats(0.01, 10), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    tolerance=st.floats(0, 2),
)
def test_the_choice_is_never_worse_than_predictions_err(seconds, seed, tolerance):
    predictions = {i: Prediction(0, each / 2, each, each) for i, each in enumerate(seconds)}
    chosen = choose(predictions, {}, tolerance, 0, random.Random(seed))
    assert seconds[chosen] <= min(seconds) + tolerance


def test_new_conversations_spread_and_one_that_has_begun_stays():
    predictions = {name: Prediction(0, 0.1, 1.0, 1.0) for name in "abcd"}
    rng, work = random.Random(0), dict.fromkeys("abcd", 0.0)
    for _ in range(400):
        work[choose(predictions, work, 0.0, None, rng)] += 1
    assert set(work.values()) == {100}
    assert {choose(predictions, {"c": 9.0}, 0.0, "c", rng) for _ in range(9)} == {"c"}
    worse = predictions | {"c": Prediction(0, 0.1, 1.5, 1.0)}
    assert choose(worse, {}, 0.1, "c", rng) != "c"
    assert {choose(worse, {"a": 9.0, "b": 9.0}, 0.1, "c", rng) for _ in range(40)} == {"a", "b", "d"}


def test_a_beginning_that_many_share_is_computed_where_less_was_done_when_that_is_worth_it():
    predictions = {"has it": Prediction(900, 0.1, 1.0, 0.2), "idle": Prediction(0, 1.0, 1.9, 1.1)}
    rng = random.Random(0)
    assert choose(predictions, {"has it": 0.8}, 0.0, None, rng) == "has it"
    assert choose(predictions, {"has it": 1.0}, 0.0, None, rng) == "idle"
    assert choose(predictions, {"has it": 1.0}, 0.0, "gone", rng) == "idle"


def test_a_breaker_opens_after_failures_tries_once_and_closes_again():
    breaker = Breaker()
    for _ in range(FAILURES - 1):
        breaker.failed(0.0)
    assert breaker.allows(0.0)
    breaker.failed(0.0)
    assert not breaker.allows(0.0) and breaker.state(0.0) == "open"
    now = FIRST_REST + 0.1
    assert breaker.allows(now) and breaker.state(now) == "trying"
    breaker.sent(now)
    assert not breaker.allows(now)
    breaker.failed(now + 0.1)
    assert not breaker.allows(now + 0.1 + 1.9 * FIRST_REST) and breaker.allows(now + 0.2 + 2 * FIRST_REST)
    breaker.succeeded()
    assert breaker.state(now) == "closed"


def test_extra_requests_are_a_part_of_all():
    budget, spent = Budget(0.1, burst=2.0), 0
    for _ in range(1000):
        budget.earn()
        spent += budget.spend()
    assert spent == pytest.approx(102, abs=2)


# Pages


def test_a_prompts_pages_are_found_where_the_cache_has_them():
    events = Events()
    cache, worker, reader = KVCache(50, 4, True, events), Worker("http://w"), Reader("", 0)
    worker.about = {"page_size": 4}
    prompt = list(range(23))
    pages = page_names(prompt, 4, "salt")
    assert worker.hit(pages, len(prompt)) == 0
    lease = cache.match(prompt[:14], "salt")
    cache.grow(lease, 14)
    cache.commit(lease, prompt[:14])
    take(worker, reader.news(events))
    assert worker.hit(pages, len(prompt)) == 12 == cache.match(prompt, "salt").length
    assert worker.hit(page_names(prompt, 4, ""), len(prompt)) == 0
    ticket = Ticket(pages, len(prompt), Prediction(12, 1.0, 2.0, 1.0), 0.0)
    worker.give(ticket)
    assert worker.hit(pages, len(prompt)) == 20  # as soon as what is on its way has been served
    worker.take_back(ticket)
    worker.take_back(ticket)
    assert worker.hit(pages, len(prompt)) == 12
    cache.reset()
    take(worker, reader.news(events))
    assert worker.hit(pages, len(prompt)) == 0


def test_a_gap_in_the_events_is_found_and_a_snapshot_mends_it():
    events, worker, reader = Events(), Worker("http://w"), Reader("", 0)
    worker.about = {"page_size": 4}
    take(worker, reader.news(events))
    events.stored(b"a" * 32)
    lost = reader.news(events)
    events.stored(b"b" * 32)
    with pytest.raises(Gap):
        take(worker, reader.news(events))
    assert lost is not None and not worker.mirror.pages
    worker.mirror.restart("", 0, ())
    take(worker, Reader("", 0).news(events))
    assert worker.mirror.pages == {b"a" * 8, b"b" * 8}


def test_a_worker_that_starts_again_is_followed_from_its_new_beginning():
    worker, first, second = Worker("http://w"), Events(), Events()
    first.stored(b"a" * 32)
    take(worker, Reader("", 0).news(first))
    second.stored(b"b" * 32)
    take(worker, Reader(worker.mirror.stream, worker.mirror.number).news(second))
    assert worker.mirror.pages == {b"b" * 8}


# Splitting and roles


@pytest.mark.parametrize(
    "to_compute, target, transfer, decoding, expected",
    [
        (4000, None, 1e-5, 4, "no_target"),
        (4000, 0.05, 1e-5, 0, "nobody_waits"),
        (10, 0.05, 1e-5, 4, "short_prompt"),
        (4000, 5.0, 1e-5, 4, "short_prompt"),
        (4000, 0.05, 0.01, 4, "slow_link"),
        (4000, 0.05, 1e-5, 4, "split"),
        (4000, 0.05, None, 4, "split"),
    ],
)
def test_a_prompt_is_split_only_if_it_is_long_and_disturbs_and_the_link_is_fast(
    to_compute, target, transfer, decoding, expected
):
    split, why = reason_to_split(standing(decoding=decoding), to_compute, target, transfer)
    assert (split, why) == (expected == "split", expected)


ROLES = st.lists(st.sampled_from(["prefill", "decode"]), min_size=1, max_size=9)
SECONDS = st.floats(0, 20)


@given(roles=ROLES, prompts=SECONDS, answers=SECONDS)
def test_moves_help_end_and_leave_a_worker_on_each_side(roles, prompts, answers):
    now = {str(i): role for i, role in enumerate(roles)}
    sides, demand, moves = set(roles), Demand(prompts, answers), 0
    while move := next_move(now, {}, demand):
        before = busiest(demand, *_sides(now))
        worker, role = move
        assert now[worker] != role
        now[worker] = role
        assert busiest(demand, *_sides(now)) < before
        moves += 1
        assert moves <= len(roles)
    assert sides <= set(now.values())


@given(total=st.integers(2, 9), prompts=st.floats(0.1, 20), answers=st.floats(0.1, 20))
def test_the_roles_that_are_reached_are_about_the_best(total, prompts, answers):
    now = {str(i): "prefill" if i else "decode" for i in range(total)}
    demand = Demand(prompts, answers)
    while move := next_move(now, {}, demand):
        now[move[0]] = move[1]
    best = min(busiest(demand, n, total - n) for n in range(1, total))
    assert busiest(demand, *_sides(now)) <= best / 0.9 + 1e-9


def test_the_idlest_worker_moves():
    roles = {"a": "prefill", "b": "prefill", "c": "decode"}
    assert next_move(roles, {"a": 3, "b": 1, "c": 0}, Demand(0.1, 2.0)) == ("b", "decode")


def _sides(roles: dict[str, str]) -> tuple[int, int]:
    return sum(r == "prefill" for r in roles.values()), sum(r == "decode" for r in roles.values())


# Addresses


@pytest.mark.parametrize(
    "fields, words",
    [
        ({}, "no workers"),
        ({"workers": ("10.0.0.1:8000",)}, "is no address"),
        ({"workers_dns": "http://name"}, "names no port"),
        ({"workers": ("http://a:1",), "retries": -1}, "negative"),
        ({"workers": ("http://a:1",), "lost_after": 0.0}, "above 0"),
        ({"workers": ("http://a:1",), "hedge_limit": 2.0}, "between 0 and 1"),
        ({"workers": ("http://a:1",), "routing_policy": "best"}, "cost or round-robin"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_what_would(fields, words):
    with pytest.raises(ConfigError, match=words):
        RouterConfig(**fields)


async def test_a_name_stands_for_all_its_addresses():
    addresses = Addresses(RouterConfig(("http://a:1/",), workers_dns="http://localhost:8123"))
    await addresses.resolve(1e9)
    assert addresses.now[0] == "http://a:1" and "http://127.0.0.1:8123" in addresses.now


def test_a_file_that_is_not_there_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        Addresses(RouterConfig(workers_file=str(tmp_path / "none"))).read_file()
