"""AsyncLLM: streams on any event loop, aborts, refusals when full, draining, and what is said when the engine dies."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

import jaxserve.async_llm
from jaxserve import AsyncLLM, EngineConfig, Request, SamplingParams
from jaxserve.async_llm import Deltas
from jaxserve.errors import EngineError, OverloadedError, RequestError
from jaxserve.outputs import Collected
from jaxserve.request import Delta
from tests.engines import around, check_idle, complete, greedy
from tests.jaxserve.scripted import Scripted, said

ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True, seed=1)


class Held(Scripted):
    """A scripted device whose steps wait until they are let go; after so many they wait once more."""

    def __init__(self, steps: int = -1):
        super().__init__({})
        self.go, self.left = threading.Event(), steps

    def launch(self, rows, told=None):
        pending = super().launch(rows)
        assert self.go.wait(30)
        self.left -= 1
        if self.left == 0:
            self.go.clear()
        return pending


Make = Callable[..., AsyncLLM]


@pytest.fixture
def make(tiny):
    """AsyncLLMs on the shared model, or on a device that is given; closed at the end, and no thread left over."""
    made: list[AsyncLLM] = []

    def llm(device=None, pages=160, **settings) -> AsyncLLM:
        def rebuilt(config: EngineConfig, metrics, events):
            engine = around(tiny, device, pages, **settings)
            engine.metrics = metrics
            return replace(tiny, engine=engine, config=engine.config)

        made.append(AsyncLLM("tiny", build=rebuilt))
        return made[-1]

    yield llm
    for one in made:
        if isinstance(one._engine.runner, Held):
            one._engine.runner.go.set()
        one.close()
        one._thread.join(30)  # after a failure `close` does not wait for it
        assert not one._thread.is_alive()


async def collect(stream: Deltas, request: Request) -> Collected:
    collected = Collected(request)
    async for delta in stream:
        collected.add(delta)
    return collected


async def run(llm: AsyncLLM, name: str, prompt, params: SamplingParams):
    request = Request(name, prompt, params)
    return (await collect(llm.submit(request), request)).output()


async def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "never"
        await asyncio.sleep(0.005)


def idle(llm: AsyncLLM) -> bool:
    return not llm._engine.busy and llm._inbox.empty()


async def assert_idle(llm: AsyncLLM) -> None:
    """Nothing is left of any request."""
    await until(lambda: idle(llm))
    check_idle(llm._engine)
    assert (llm._streams, llm._queued, llm._served) == ({}, {}, {})
    assert (llm.load().running, llm.load().waiting, llm.load().kv_usage) == (0, 0, 0)


PARAMS = {
    "greedy": greedy(max_tokens=12),
    "choices": SamplingParams(n=3, seed=4, max_tokens=6, ignore_eos=True, logprobs=1),
    "equal choices": greedy(n=4, max_tokens=5),  # which all end in the same step
    "best": SamplingParams(n=2, best_of=4, seed=4, max_tokens=6),
    "scored": greedy(max_tokens=0, prompt_logprobs=1),
}


@pytest.mark.supports("Python API", "AsyncLLM streams")
async def test_streams_give_what_the_engine_gives(tiny, make):
    llm = make()
    outputs = await asyncio.gather(
        *(run(llm, f"{name} {i}", [*range(20)], PARAMS[name]) for i in range(3) for name in PARAMS)
    )
    for output in outputs:
        name = output.request_id[:-2]
        expected = complete(around(tiny), range(20), PARAMS[name]).outputs
        assert [(c.index, c.token_ids, c.text, c.finish_reason) for c in output.outputs] == [
            (c.index, c.token_ids, c.text, c.finish_reason) for c in expected
        ]
    await assert_idle(llm)


def test_several_event_loops_may_stream_at_once(tiny, make):
    llm, expected = make(), complete(around(tiny), [5, 6, 7], greedy()).outputs[0].token_ids
    found: list[list[int]] = []

    def loop(name: str) -> None:
        async def many():
            for i in range(4):
                output = await run(llm, f"{name} {i}", [5, 6, 7], greedy())
                found.append(output.outputs[0].token_ids)

        asyncio.run(many())

    threads = [threading.Thread(target=loop, args=(str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [expected] * 16
    asyncio.run(assert_idle(llm))


def test_a_request_whose_event_loop_has_gone_is_ended(make):
    llm = make()

    async def leave():
        await anext(llm.submit(Request("left", [1], replace(ENDLESS, logprobs=20))))

    asyncio.run(leave())
    asyncio.run(assert_idle(llm))
    ended = {reason: counted_of(llm, reason) for reason in ("abort", "length")}
    assert sum(ended.values()) == 1


def counted_of(llm: AsyncLLM, reason: str) -> float:
    labels = {"model_name": "tiny", "finished_reason": reason}
    return llm.registry.get_sample_value("vllm:request_success_total", labels) or 0.0


@pytest.mark.parametrize("prompt", [3, 100])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("deltas", [0, 1, 3])
async def test_closing_an_iterator_ends_the_request_and_frees_its_pages(make, prompt, n, deltas):
    llm = make(max_num_batched_tokens=8)
    stream = llm.submit(Request("r", [9] * prompt, replace(ENDLESS, n=n)))
    for _ in range(deltas):
        await anext(stream)
    await stream.aclose()
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await assert_idle(llm)
    assert counted_of(llm, "abort") == 1, "it ran to its end, more than a hundred steps later"
    assert (await run(llm, "r", [1], greedy())).outputs[0].finish_reason == "length"


@pytest.mark.parametrize("held", ["waiting", "first step", "preempted"])
async def test_an_abort_in_any_other_state_frees_its_pages_too(make, held):
    device = Held()
    llm = make(device, pages=34, max_num_seqs=2)
    first = llm.submit(Request("first", [1] * 60, replace(ENDLESS, max_tokens=60)))
    second = llm.submit(Request("second", [2] * 50, replace(ENDLESS, max_tokens=60)))
    third = llm.submit(Request("third", [3] * 9, ENDLESS))
    await until(lambda: len(device.launched) == 1)
    if held == "preempted":
        device.go.set()
        await until(lambda: llm._engine.scheduler.preemptions > 0 or idle(llm))
        assert llm._engine.scheduler.preemptions > 0
    for stream in (third, second, first) if held == "waiting" else (first, second, third):
        await stream.aclose()
    assert llm.load().running == llm.load().waiting == 0
    device.go.set()
    await assert_idle(llm)


async def test_an_abort_from_outside_ends_the_stream(make):
    llm = make()
    stream = llm.submit(Request("r", [1], replace(ENDLESS, n=2)))
    first = await anext(stream)
    waiting = asyncio.ensure_future(collect(stream, Request("r", [1], replace(ENDLESS, n=2))))
    llm.abort("r")
    llm.abort("r")
    llm.abort("never was")
    collected = await asyncio.wait_for(waiting, 10)
    assert first.finish_reason is None
    assert [choice.finish_reason for choice in collected.output().outputs] == ["abort", "abort"]
    await assert_idle(llm)


async def test_closing_while_somebody_waits_for_the_next_delta_wakes_it(make):
    device = Held()
    llm = make(device)
    stream = llm.submit(Request("r", [1], ENDLESS))
    waiting = asyncio.ensure_future(anext(stream, None))
    await until(lambda: len(device.launched) == 1)
    await stream.aclose()
    assert await asyncio.wait_for(waiting, 10) is None


async def test_an_id_is_taken_while_its_request_lives_and_free_at_once_after_it(make):
    device = Held()
    llm = make(device)
    old = llm.submit(Request("r", [1], ENDLESS))
    with pytest.raises(RequestError, match="'r' is running already"):
        llm.submit(Request("r", [1], ENDLESS))
    await until(lambda: len(device.launched) == 1)
    llm.abort("r")
    device.scripts[2] = said("new")
    new = llm.submit(Request("r", [1], SamplingParams(seed=2, max_tokens=3)))
    await old.aclose()  # of the old one; the new one goes on
    assert llm.load().running + llm.load().waiting == 1
    device.go.set()
    text = "".join([delta.text async for delta in new])
    assert text == "new"
    assert [delta.finish_reason async for delta in old] == []
    await assert_idle(llm)


@pytest.mark.parametrize(
    "request_, param",
    [
        (Request("r", [], greedy()), "prompt"), (Request("r", [999], greedy()), "prompt"),
        (Request("r", [1] * 500, greedy()), "messages"), (Request("r", [1], greedy(), cache_salt=7), "cache_salt"),
        (Request("r", [1], greedy(), priority=1.5), "priority"),
    ],
)  # fmt: skip
async def test_a_refusal_raises_at_submit_and_leaves_nothing(make, request_, param):
    llm = make()
    with pytest.raises(RequestError) as refusal:
        llm.submit(request_)
    assert refusal.value.param == param
    await assert_idle(llm)
    assert (await run(llm, "r", [1], greedy())).outputs[0].finish_reason == "length"


async def test_a_full_queue_refuses_and_what_runs_is_not_slowed(make):
    """However many more come, those that were let in are all served."""
    llm = make(max_num_seqs=2, max_num_queued_reqs=3)
    streams, refused = [], 0
    for i in range(200):
        request = Request(str(i), [i % 250] * 5, greedy(max_tokens=4))
        try:
            streams.append(asyncio.ensure_future(collect(llm.submit(request), request)))
        except OverloadedError as why:
            refused += 1
            assert 1 <= why.retry_after <= 60 and not why.draining and "waiting" in str(why)
        if i % 20 == 0:
            await until(lambda: not llm._streams)
    done = await asyncio.gather(*streams)
    assert len(done) + refused == 200 and len(done) >= 10 * 5
    assert all(one.output().outputs[0].finish_reason == "length" for one in done)
    labels = {"model_name": "tiny", "reason": "queue_full"}
    assert llm.registry.get_sample_value("vllm:admission_rejections_total", labels) == refused > 0
    await assert_idle(llm)


async def test_the_queue_takes_exactly_as_many_as_set(make):
    device = Held()
    llm = make(device, max_num_seqs=2, max_num_queued_reqs=3)
    streams = [llm.submit(Request(str(i), [1], ENDLESS)) for i in range(5)]
    with pytest.raises(OverloadedError, match="requests with"):
        llm.submit(Request("more", [1], ENDLESS))
    await streams.pop().aclose()
    streams.append(llm.submit(Request("more", [1], ENDLESS)))
    for stream in streams:
        await stream.aclose()
    device.go.set()
    await assert_idle(llm)


async def test_a_queue_full_of_tokens_refuses_but_never_the_first(make):
    device = Held()
    llm = make(device, max_num_seqs=1, max_num_queued_tokens=50)
    streams = [llm.submit(Request("long", [1] * 100, ENDLESS))]
    with pytest.raises(OverloadedError, match="100 prompt tokens"):
        llm.submit(Request("more", [1], ENDLESS))
    await until(lambda: len(device.launched) == 1)
    device.go.set()
    await anext(streams[0])
    streams += [llm.submit(Request(str(i), [1] * 20, ENDLESS)) for i in range(2)]
    with pytest.raises(OverloadedError):
        llm.submit(Request("again", [1] * 20, ENDLESS))
    labels = {"model_name": "tiny", "reason": "queued_tokens"}
    assert llm.registry.get_sample_value("vllm:admission_rejections_total", labels) == 2
    for stream in streams:
        await stream.aclose()
    await assert_idle(llm)


async def test_draining_finishes_what_runs_and_refuses_the_rest(make):
    llm = make()
    request = Request("r", [1], greedy(max_tokens=30))
    running = asyncio.ensure_future(collect(llm.submit(request), request))
    await asyncio.sleep(0)
    draining = asyncio.ensure_future(llm.drain(30))
    await asyncio.sleep(0)
    assert llm.health().state == "draining"
    with pytest.raises(OverloadedError) as refusal:
        llm.submit(Request("late", [1], greedy()))
    assert refusal.value.draining and refusal.value.retry_after > 0
    await asyncio.wait_for(draining, 30)
    assert len((await running).output().outputs[0].token_ids) == 30
    await assert_idle(llm)


async def test_draining_ends_what_does_not_finish_in_time(make):
    device = Held()
    llm = make(device, max_num_seqs=1)
    streams = [llm.submit(Request(str(i), [1], ENDLESS)) for i in range(3)]
    await until(lambda: len(device.launched) == 1)
    await llm.drain(0.05)
    device.go.set()
    for stream in streams:
        with pytest.raises(OverloadedError) as ended:
            async for _ in stream:
                pass
        assert ended.value.draining
    await assert_idle(llm)


async def test_an_abandoned_request_does_not_outlive_a_drain(make):
    """Its abort may come while the rest is being ended."""
    device = Held()
    llm = make(device)
    gone = llm.submit(Request("gone", [1], ENDLESS))
    await until(lambda: len(device.launched) == 1)
    await llm.drain(0)
    await gone.aclose()
    device.go.set()
    await assert_idle(llm)


async def test_closing_ends_every_stream_and_twice_does_no_harm(make):
    llm = make()
    streams = [llm.submit(Request(str(i), [1], replace(ENDLESS, n=2))) for i in range(12)]
    await anext(streams[0])
    closing = [threading.Thread(target=llm.close) for _ in range(2)]
    for thread in closing:
        thread.start()
    for stream in streams:
        with pytest.raises(OverloadedError):
            async for _ in stream:
                pass
    for thread in closing:
        thread.join(10)
    assert not llm._thread.is_alive()
    check_idle(llm._engine)
    with pytest.raises(OverloadedError):
        llm.submit(Request("late", [1], greedy()))


async def test_a_failure_of_the_engine_reaches_every_stream_and_the_health(make):
    llm = make(Scripted({}, fail_at=6), max_num_seqs=2)
    assert llm.health().state == "ready"
    streams = [llm.submit(Request(str(i), [1], ENDLESS)) for i in range(5)]
    for stream in streams:
        with pytest.raises(EngineError, match="the device is gone"):
            async for _ in stream:
                pass
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert llm.health().state == "dead" and "the device is gone" in llm.health().detail
    with pytest.raises(EngineError, match="the device is gone"):
        llm.submit(Request("late", [1], greedy()))
    llm.abort("0")
    await llm.drain(5)
    llm.close()
    assert llm.health().state == "dead"


async def test_a_step_that_does_not_come_back_is_a_stall(make, monkeypatch):
    monkeypatch.setattr(jaxserve.async_llm, "STALLED_AFTER", 0.2)
    monkeypatch.setattr(jaxserve.async_llm, "IDLE_WAIT", 0.05)
    device = Held()
    llm = make(device)
    await asyncio.sleep(0.5)
    assert llm.health().state == "ready", "nothing to do is no stall"
    stream = llm.submit(Request("r", [1], ENDLESS))
    await until(lambda: llm.health().state == "stalled")
    assert "no step was finished" in llm.health().detail
    device.go.set()
    assert isinstance(await anext(stream), Delta)
    await until(lambda: llm.health().state == "ready")
    await stream.aclose()


async def test_the_load_counts_requests_and_tokens(make):
    device = Held(steps=2)
    llm = make(device, max_num_seqs=1)
    streams = [llm.submit(Request(str(i), [1] * 10, ENDLESS)) for i in range(3)]
    load = llm.load()
    assert load.running + load.waiting == 3 and load.waiting_tokens == 10 * load.waiting
    device.go.set()
    await anext(streams[0])
    load = llm.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (1, 2, 20) and load.kv_usage > 0
    device.go.set()
    for stream in streams:
        await stream.aclose()
    await assert_idle(llm)


async def test_nothing_grows_over_thousands_of_requests(make):
    """Whether they end by themselves, are closed early or never started."""
    llm = make(Scripted({}), max_num_queued_reqs=10_000)

    async def one(i: int) -> None:
        stream: AsyncIterator[Delta] = llm.submit(
            Request(f"{i}", [i % 250, i // 250], greedy(n=1 + i % 2, max_tokens=3))
        )
        if i % 3:
            async for _ in stream:
                if i % 5 == 0:
                    break
        await stream.aclose()

    for start in range(0, 4000, 200):
        await asyncio.gather(*(one(i) for i in range(start, start + 200)))
        assert len(llm._engine.started) <= 200
    await assert_idle(llm)
    cache = llm._engine.scheduler.cache
    assert cache.free + cache.cached == cache.num_pages - 1
    assert sum(counted_of(llm, reason) for reason in ("length", "abort")) <= 4000
