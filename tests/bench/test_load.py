"""The load generator: arrivals are open loop, waits are counted, and the numbers are those of the records."""

import asyncio
import itertools
import json
import math
import random
from statistics import fmean

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.config import LoadConfig
from bench.load import Piece, Record, open_loop
from bench.results import goals, percentile, plot, save, show, summarize
from bench.serve import ServerTarget
from bench.workloads import Work, arrivals, file_works, random_works
from jaxserve.errors import ConfigError


def test_poisson_arrivals_keep_the_rate_and_vary():
    times = arrivals(4000, 10.0, seed=1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert fmean(gaps) == pytest.approx(0.1, rel=0.1)
    assert sum(gap > 0.1 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.05)


def test_fixed_arrivals_are_evenly_spaced_and_inf_is_all_at_once():
    assert arrivals(3, 4.0, fixed=True) == [0.0, 0.25, 0.5]
    assert arrivals(3, math.inf) == [0.0, 0.0, 0.0]


@given(st.integers(1, 50), st.integers(1, 50), st.floats(0, 0.9), st.integers(40, 5000))
def test_random_works_stay_within_lengths_and_vocabulary(input_len, output_len, ratio, vocab_size):
    for work in random_works(5, input_len, output_len, vocab_size=vocab_size, range_ratio=ratio):
        assert math.floor(input_len * (1 - ratio)) <= len(work.prompt) <= math.ceil(input_len * (1 + ratio))
        assert 1 <= work.output_len <= math.ceil(output_len * (1 + ratio))
        assert all(isinstance(token, int) and 0 <= token < vocab_size for token in work.prompt)


def test_a_dataset_is_read_and_repeated(tmp_path):
    file = tmp_path / "traffic.jsonl"
    file.write_text('{"prompt": "a", "output_len": 3, "seed": 1}\n{"prompt": [1, 2]}\n')
    works = file_works(str(file), 3, 9)
    assert works == [Work("a", 3, {"seed": 1}), Work([1, 2], 9), Work("a", 3, {"seed": 1})]
    file.write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match=r"traffic\.jsonl:1"):
        file_works(str(file), 1, 9)


class Slow:
    """A target that serves one request at a time, so later arrivals wait."""

    def __init__(self):
        self.lock, self.under_way, self.most = asyncio.Lock(), 0, 0

    async def send(self, work: Work):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        async with self.lock:
            for i in range(work.output_len):
                await asyncio.sleep(0.01)
                yield Piece(True, i + 1, 7)
        self.under_way -= 1


async def test_latency_counts_from_the_arrival_even_behind_a_full_client():
    target = Slow()
    times = [0.0, 0.001, 0.002]
    records, duration = await open_loop([Work("x", 2)] * 3, times, target.send, max_concurrency=1)
    assert target.most == 1 and [r.arrival for r in records] == times
    assert records[2].ttft >= 0.04 and duration >= 0.06  # two requests of two pieces went before
    assert all(r.output_tokens == 2 and r.input_tokens == 7 and not r.error for r in records)


async def test_requests_are_sent_on_time_although_none_was_answered():
    target = Slow()
    await open_loop([Work("x", 3)] * 4, [0.0, 0.001, 0.002, 0.003], target.send)
    assert target.most == 4


async def test_all_at_once_with_places_is_a_closed_loop():
    records, _ = await open_loop([Work("x", 2)] * 3, [0.0] * 3, Slow().send, max_concurrency=1)
    assert records[2].arrival >= 0.04


async def test_a_failed_request_is_counted_not_raised():
    async def send(work):
        yield Piece(True, 1, 1)
        raise RuntimeError("HTTP 503: full")

    records, duration = await open_loop([Work("x", 2)], [0.0], send)
    result = summarize(records, duration, percentiles=[50], goodput={})
    assert (result["completed"], result["failed"], result["errors"]) == (0, 1, ["HTTP 503: full"])


def test_the_fields_are_those_of_the_records(tmp_path, capsys):
    records = [Record(1.0, [1.5, 1.6, 1.8], 10, 5), Record(2.0, [2.1, 2.2], 20, 3), Record(3.0, error="no")]
    result = summarize(records, 4.0, percentiles=[50, 99], goodput=goals(["ttft:200", "tpot:100"]))
    assert (result["completed"], result["failed"]) == (2, 1)
    assert result["request_throughput"] == 0.5 and result["output_throughput"] == 2.0
    assert result["total_token_throughput"] == 9.5 and result["request_goodput"] == 0.25
    assert result["mean_ttft_ms"] == pytest.approx(300) and result["p50_e2el_ms"] == pytest.approx(500)
    assert result["mean_tpot_ms"] == pytest.approx((75 + 50) / 2)
    assert result["median_itl_ms"] == pytest.approx(100)
    runs = [{"model_id": "m", "request_rate": rate, **result} for rate in (1.0, "inf")]
    show(runs, [50, 99])
    assert "300.0" in capsys.readouterr().out
    save(str(tmp_path / "out.json"), {"num_prompts": 3}, runs)
    assert json.loads((tmp_path / "out.json").read_text())["runs"][1]["request_rate"] == "inf"
    plot(str(tmp_path / "out.png"), runs, 99)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_lies_between_the_extremes(values, p):
    assert min(values) <= percentile(values, p) <= max(values)
    assert percentile(random.sample(values, len(values)), 0) == min(values)


@pytest.mark.parametrize("word", ["ttft", "ttft:fast", "itl:5"])
def test_a_goal_that_is_none_is_refused(word):
    with pytest.raises(ConfigError, match="goodput"):
        goals([word])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"base_url": "x", "model": "y"},
        {"model": "y", "request_rate": (0.0,)},
        {"model": "y", "num_prompts": 0},
    ],
)
def test_a_load_that_cannot_be_is_refused(fields):
    with pytest.raises(ConfigError):
        LoadConfig(**fields)


def _target(answer) -> ServerTarget:
    target = ServerTarget("http://test/v1", None, "key", {"min_tokens": 2})
    target.client = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://test")
    return target


async def test_a_server_is_asked_by_stream_and_its_usage_is_taken():
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        seen.append(json.loads(request.content))
        events = [
            {"choices": [{"text": "a"}]},
            {"choices": [{"text": "b"}]},
            {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
        ]
        lines = ": keep-alive\n\n" + "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return httpx.Response(200, text=lines + "data: [DONE]\n\n")

    target = _target(answer)
    await target.open()
    pieces = [piece async for piece in target.send(Work([1, 2, 3], 2))]
    await target.close()
    assert pieces == [Piece(True), Piece(True), Piece(False, 2, 3)]
    assert seen[0] | {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2, "min_tokens": 2} == seen[0]


async def test_a_servers_refusal_is_the_records_error():
    target = _target(lambda request: httpx.Response(503, text="full"))
    with pytest.raises(RuntimeError, match="503: full"):
        [piece async for piece in target.send(Work("x", 2))]
    with pytest.raises(ConfigError, match="503"):
        await target.open()
