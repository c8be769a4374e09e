"""A split changes no token, whatever fails on the way, and every page comes home."""

import asyncio
import random
from collections import Counter
from functools import partial
from typing import Any

import pytest

from jaxserve import AsyncLLM
from jaxserve.build import build
from jaxserve.errors import RequestError
from jaxserve.handover.messages import Incompatible
from jaxserve.layered_step import LayeredPrograms
from jaxserve.request import Request
from tests.server.splits import (
    SIZES,
    FaultyLink,
    counted,
    failures,
    findable,
    forget,
    greedy,
    pair,
    run,
    settled,
    tokens,
)
from tests.tiny import tiny_checkpoint

PROMPT = [(i * 37 + i // 7) % 250 for i in range(90)]


@pytest.fixture(scope="module")
def start(tmp_path_factory, compilation_cache_dir):
    """Starts engines of tiny models."""
    engines: list[AsyncLLM] = []

    def start(path: str | None = None, seed: int = 0, **settings) -> AsyncLLM:
        if path is None:
            path = str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True, layers=3, seed=seed))
        settings = SIZES | {"compilation_cache_dir": compilation_cache_dir} | settings
        made = AsyncLLM(path, build=partial(build, layer_groups=2), **settings)
        engines.append(made)
        return made

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def engines(start, tmp_path_factory):
    """With layers that leave in two groups, of two and of one."""
    path = str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True, layers=3))
    return start(path), start(path)


@pytest.fixture(scope="module")
def link():
    made = FaultyLink("127.0.0.1")
    yield made
    made.close()


@pytest.fixture(scope="module")
def module_pair(engines, link):
    prefill, decode = engines
    return pair(prefill, decode, link, kv_silence_timeout=1.0)


@pytest.fixture
def split(module_pair, link):
    """(prefill, decode), with empty caches and a link that works."""
    link.fail("", 0)
    for each in module_pair:
        forget(each)
    return module_pair


@pytest.mark.supports("disaggregation", "prefill and decode in two engines")
async def test_tokens_are_those_of_one_engine_and_prefixes_are_reused_on_both_sides(split):
    prefill, decode = split
    alone = await tokens(prefill.llm, PROMPT)
    forget(prefill)
    first = await run(decode, PROMPT)
    assert [t for d in first for t in d.token_ids] == alone
    assert first[0].num_cached_tokens == 0 and counted(decode, "tokens_total") == 88  # of 90: full pages
    longer = PROMPT + alone + PROMPT[:10]
    again = await run(decode, longer)
    assert [t for d in again for t in d.token_ids] == await tokens(prefill.llm, longer)
    assert counted(decode, "tokens_total") < len(longer)  # what decode had did not travel
    assert again[0].num_cached_tokens >= 88  # and what prefill had was not computed
    await settled(*split)


@pytest.mark.supports("disaggregation", "layers leave while later layers compute")
async def test_the_first_layers_have_come_before_the_last_ones_are_computed(split, link, monkeypatch):
    """The last layer's program is not even launched before a block of those before it is fetched; in bounded time."""
    prefill, decode = split
    expected = await tokens(prefill.llm, PROMPT)
    forget(prefill)
    runner: Any = prefill.llm._engine.runner
    last = runner.layer_groups[-1]
    assert [group.count for group in runner.layer_groups] == [2, 1]
    waited: list[bool] = []

    def after_the_first_block(program, *args):
        if int(args[-1]) == last.first:
            waited.append(link.came.wait(30))
        return program(*args)

    for programs in runner._compiled.values():
        if isinstance(programs, LayeredPrograms):
            held = partial(after_the_first_block, programs._programs[last.program])
            monkeypatch.setitem(programs._programs, last.program, held)
    link.fail("", -1)
    link.came.clear()
    before = counted(decode, "hidden_bytes_total")
    assert await tokens(decode, PROMPT) == expected
    assert len(waited) >= 4 and all(waited), "in each of four chunks"
    assert counted(decode, "hidden_bytes_total") > before
    await settled(*split)


async def test_nothing_compiles_for_a_prompt_that_travels(split):
    prefill, decode = split
    before = [compiles(each) for each in split]
    assert await tokens(decode, PROMPT[::-1]) == await tokens(prefill.llm, PROMPT[::-1])
    assert [compiles(each) for each in split] == before


def compiles(split) -> float:
    return split.llm.registry.get_sample_value(
        "jaxserve:compiles_total", {"model_name": split.llm.config.model}
    )


async def test_logprobs_penalties_seeds_stops_and_choices_are_those_of_one_engine(split):
    prefill, decode = split
    for params in (
        greedy(logprobs=2),
        greedy(temperature=0.9, seed=5, repetition_penalty=1.3, presence_penalty=0.5),
        greedy(temperature=1.0, seed=7, n=3),
        greedy(max_tokens=1),
        greedy(stop=["a", "e", "o", " "], ignore_eos=False, max_tokens=30),
    ):
        plain, divided = await run(prefill.llm, PROMPT, params), await run(decode, PROMPT, params)

        def outline(deltas):
            text, ids = Counter(), {}
            for d in deltas:
                ids.setdefault(d.index, []).extend(d.token_ids)
                text[d.index] = (text[d.index] or "") + d.text  # type: ignore[operator]
            ends = {d.index: (d.finish_reason, d.stop_reason) for d in deltas if d.finish_reason}
            chosen = [next(iter(of)) for d in deltas for of in d.logprobs or ()]
            return ids, dict(text), ends, chosen

        assert outline(plain) == outline(divided), params
    await settled(*split)


@pytest.mark.supports("disaggregation", "corrupt, late and lost pages are recomputed, never served")
@pytest.mark.parametrize("fault", ["cut", "stalled", "corrupt", "another"])
async def test_what_does_not_arrive_in_order_is_computed_again(split, link, fault):
    prefill, decode = split
    expected = await tokens(prefill.llm, PROMPT)
    forget(prefill)
    before = sum(failures(decode, reason) for reason in ("transfer", "corrupt"))
    link.fail(fault, at=1)
    assert await tokens(decode, PROMPT) == expected
    assert sum(failures(decode, reason) for reason in ("transfer", "corrupt")) == before + 1
    await settled(*split)


async def test_a_client_that_leaves_at_any_moment_leaves_nothing_behind(split):
    async def leave(after: float) -> None:
        task = asyncio.create_task(
            tokens(split[1], [*PROMPT[:-1], int(after * 1e4) % 250], greedy(max_tokens=30))
        )
        await asyncio.sleep(after)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(leave(after / 1000) for after in range(0, 120, 4)))
    await settled(*split)
    assert await tokens(split[1], PROMPT) == await tokens(split[0].llm, PROMPT)


async def test_a_lease_that_nobody_renews_frees_its_blocks_and_the_prompt_is_computed_again(
    split, link, monkeypatch
):
    prefill, decode = split
    expected = await tokens(prefill.llm, PROMPT)
    forget(prefill)
    expired = counted(prefill, "lease_expiries_total")
    monkeypatch.setattr(prefill.sender.leases, "seconds", 0.2)
    monkeypatch.setattr(decode.receiver._renewals, "begin", lambda *_: None)  # as if that process stood still
    link.fail("stalled", at=1)
    assert await tokens(decode, PROMPT) == expected
    assert counted(prefill, "lease_expiries_total") == expired + 1
    await settled(*split)


async def test_a_full_cache_is_waited_for_and_then_the_prompt_is_computed_here(split):
    prefill, decode = split
    expected = await tokens(prefill.llm, PROMPT)
    before = failures(decode, "no_room")
    hold = [n % 250 for n in range(92)]
    held = decode.llm.call(lambda engine: [decode.pages.reserve([i, *hold], "") for i in range(4)]).result()
    assert all(held) and decode.pages.counts()["used"] == 4 * 23
    answer = asyncio.create_task(tokens(decode, PROMPT))
    while failures(decode, "no_room") == before:
        await asyncio.sleep(0.01)
    for each in held:
        decode.llm.call(lambda engine, each=each: decode.pages.release(each)).result()
    assert await answer == expected
    await settled(*split)


async def test_what_was_offered_stays_as_it_is_when_its_pages_hold_other_prompts(split, link):
    prefill, decode = split
    expected = await tokens(prefill.llm, PROMPT)
    forget(prefill)
    before = counted(decode, "tokens_total")
    link.fail("late", at=1)
    answer = asyncio.create_task(tokens(decode, PROMPT))
    while link.fetched < 2:
        await asyncio.sleep(0.01)
    for i in range(6):
        await tokens(prefill.llm, [250 - i, *PROMPT], greedy(max_tokens=2))
    assert findable(prefill, PROMPT) == 0, "every page of it has been given out again"
    link.go_on.set()
    assert await answer == expected
    assert counted(decode, "tokens_total") == before + 88, "it came, late as it was"
    await settled(*split)


async def test_a_burst_of_clients_that_leave_a_full_cache_wedges_nothing(split):
    prefill, decode = split
    expected = await tokens(prefill.llm, PROMPT)
    hold = [n % 250 for n in range(92)]
    held = decode.llm.call(lambda engine: [decode.pages.reserve([i, *hold], "") for i in range(4)]).result()
    burst = [asyncio.create_task(tokens(decode, [i, *PROMPT])) for i in range(20)]
    await asyncio.sleep(0.2)
    for each in burst:
        each.cancel()
    await asyncio.gather(*burst, return_exceptions=True)
    for each in held:
        decode.llm.call(lambda engine, each=each: decode.pages.release(each)).result()
    assert await tokens(decode, PROMPT) == expected
    assert decode.health().state == "ready" and decode.llm.load().running == decode.llm.load().waiting == 0
    await settled(*split)


async def test_a_history_that_is_told_otherwise_is_reused_as_far_as_it_is_the_same(split):
    prefill, decode = split
    answer = await tokens(decode, PROMPT)
    retold = PROMPT + answer[6:] + PROMPT[:20]  # the first tokens, of thinking, are left out of the next turn
    before = counted(decode, "tokens_total")
    said = await tokens(decode, retold)
    assert counted(decode, "tokens_total") - before == len(retold) // 4 * 4 - 88
    forget(prefill)
    assert said == await tokens(prefill.llm, retold)
    await settled(*split)


async def test_other_weights_other_releases_and_other_rows_are_refused_by_name(split):
    ours = split[1].handshake
    for name, value in (("model", "0" * 64), ("layers", 61), ("row", (1, 8))):
        other = type(ours)(**vars(ours) | {name: value})
        with pytest.raises(Incompatible, match=f"{name} is .* here and .* there"):
            ours.link_to(other, "tcp")
    other = type(ours)(**vars(ours) | {"versions": {"jaxserve": "9.9", "jax": "1"}})
    with pytest.raises(Incompatible, match=r"jaxserve is .* here and 9\.9 there"):
        ours.link_to(other, "tcp")
    with pytest.raises(Incompatible, match="transfer"):
        ours.link_to(type(ours)(**vars(ours) | {"transfer": {"pigeon": "x"}}), "tcp")
    with pytest.raises(Incompatible, match="protocol"):
        type(ours).read(ours.written() | {"protocol": 1})
    assert type(ours).read(ours.written()) == ours


async def test_a_request_that_no_engine_could_serve_is_refused_at_once(split):
    with pytest.raises(RequestError, match="maximum context length"):
        split[1].submit(Request("long", [1] * 200, greedy()))


def test_a_model_with_other_weights_has_another_fingerprint(start, engines):
    from jaxserve.handover.handshake import fingerprint

    same, twin, other = (e._engine.runner.params for e in (*engines, start(seed=1)))
    config = engines[0].model_config
    assert fingerprint(config, same) == fingerprint(config, twin) != fingerprint(config, other)


@pytest.mark.supports("disaggregation", "chaos: no wrong token, no lost page")
async def test_chaos_ends_with_every_answer_right_or_given_up_and_every_page_home(split, link):
    prefill, decode = split
    rng = random.Random(0)
    prompts = [PROMPT[: rng.randrange(20, 90)] + [rng.randrange(250) for _ in range(5)] for _ in range(30)]
    expected = [await tokens(prefill.llm, prompt) for prompt in prompts]
    forget(prefill)

    async def one(i: int) -> list[int] | None:
        await asyncio.sleep(rng.random())
        try:
            async with asyncio.timeout(rng.choice([0.02, 0.1, 0.3, 60, 60, 60])):
                return await tokens(decode, prompts[i])
        except TimeoutError:
            return None

    async def trouble() -> None:
        while True:
            link.fail(rng.choice(["cut", "stalled", "corrupt", "another"]), at=rng.randrange(3))
            await asyncio.sleep(0.1)

    troubling = asyncio.create_task(trouble())
    answers = await asyncio.gather(*(one(i) for i in range(len(prompts))))
    troubling.cancel()
    assert all(answer in (None, right) for answer, right in zip(answers, expected, strict=True))
    assert sum(answer is not None for answer in answers) >= 5
    await settled(*split)
