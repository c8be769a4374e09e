"""The engine's decisions: when a choice ends, what of it is shown, which choices are best, what is refused."""

import pytest

from jaxserve.errors import RequestError
from jaxserve.request import Delta, Request
from jaxserve.sampling.params import SamplingParams
from tests.engines import Traffic, around, check_idle, complete, counted, greedy
from tests.jaxserve.scripted import END, Scripted, said


def run(tiny, script: list[int], **fields) -> list[Delta]:
    """The deltas of a request whose model says `script`."""
    engine = around(tiny, Scripted({7: script}))
    engine.add(
        engine.prepare(Request("r", [65, 66], SamplingParams(**{"seed": 7, "max_tokens": 40} | fields)))
    )
    deltas = []
    while engine.busy:
        deltas += [delta for _, delta in engine.step()]
    check_idle(engine)
    assert [delta.finish_reason is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    return deltas


def told(deltas: list[Delta]) -> tuple[str, int, str | None, int | str | None]:
    last = deltas[-1]
    return (
        "".join(delta.text for delta in deltas), sum(len(delta.token_ids) for delta in deltas),
        last.finish_reason, last.stop_reason,
    )  # fmt: skip


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"stop": "lo w"}, ("Hel", 7, "stop", "lo w")),
        ({"stop": ["world", "lo w"]}, ("Hel", 7, "stop", "lo w")),
        ({"stop": "lo w", "include_stop_str_in_output": True}, ("Hello w", 7, "stop", "lo w")),
        ({"stop": "H"}, ("", 1, "stop", "H")),
        ({"stop": "lox"}, ("Hello world", 12, "stop", None)),
        ({"stop": "o", "min_tokens": 5}, ("Hello w", 8, "stop", "o")),
        ({"stop": "o", "max_tokens": 5}, ("Hell", 5, "stop", "o")),
        ({"stop": "ox", "max_tokens": 5}, ("Hello", 5, "length", None)),
        ({"stop": "d"}, ("Hello worl", 11, "stop", "d")),
        ({"stop_token_ids": [ord("w")]}, ("Hello ", 7, "stop", ord("w"))),
        (
            {"stop_token_ids": [ord("w")], "include_stop_str_in_output": True},
            ("Hello w", 7, "stop", ord("w")),
        ),
        ({"stop_token_ids": [ord("o")], "min_tokens": 6}, ("Hello w", 8, "stop", ord("o"))),
        ({}, ("Hello world", 12, "stop", None)),
        ({"skip_special_tokens": False}, ("Hello world", 12, "stop", None)),
        ({"ignore_eos": True, "max_tokens": 14}, ("Hello world..", 14, "length", None)),
        (
            {"ignore_eos": True, "max_tokens": 13, "skip_special_tokens": False},
            ("Hello world</s>.", 13, "length", None),
        ),
        ({"max_tokens": 1}, ("H", 1, "length", None)),
        ({"max_tokens": 0}, ("", 0, "length", None)),
        ({"max_tokens": 11}, ("Hello world", 11, "length", None)),
        ({"max_tokens": None}, ("Hello world", 12, "stop", None)),
        ({"detokenize": False}, ("", 12, "stop", None)),
        ({"detokenize": False, "stop_token_ids": [ord("w")]}, ("", 7, "stop", ord("w"))),
    ],
)
def test_where_an_output_ends_and_what_is_shown(tiny, fields, expected):
    assert told(run(tiny, said("Hello world", END), **fields)) == expected


def test_without_a_limit_it_goes_on_to_the_models(tiny):
    deltas = run(tiny, [], max_tokens=None)
    assert told(deltas) == ("." * 126, 126, "length", None)


def test_no_delta_ever_shows_a_part_of_a_stop_string(tiny):
    shown = ""
    for delta in run(tiny, said("to be or not to be!", END), stop=["to be!"]):
        shown += delta.text
        assert "to be or not ".startswith(shown)
    assert shown == "to be or not "


def test_characters_come_whole_and_what_is_left_at_the_end_comes_too(tiny):
    deltas = run(tiny, said("é🎉x", END))
    assert [delta.text for delta in deltas if delta.text] == ["é", "🎉", "x"]
    assert told(run(tiny, said("a🎉")[:3], max_tokens=3))[0] == "a\N{REPLACEMENT CHARACTER}"


def test_a_second_end_of_sequence_counts_as_well(tiny):
    assert told(run(tiny, said("Hi", 259))) == ("Hi", 3, "stop", None)


@pytest.mark.parametrize("ahead", [True, False])
def test_best_of_gives_the_likeliest_choices_best_first(tiny, ahead):
    texts = {5: "aaaa", 6: "bb", 7: "cccccc", 8: "d"}
    likely = {5: -2.0, 6: -0.5, 7: -0.25, 8: -3.0}  # of every token; the mean is the same, the sum is not
    device = Scripted({seed: said(text, END) for seed, text in texts.items()}, likely)
    engine = around(tiny, device, async_scheduling=ahead)
    output = complete(engine, "A", SamplingParams(n=2, best_of=4, seed=5, logprobs=0))
    assert [(choice.index, choice.text) for choice in output.outputs] == [(0, "cccccc"), (1, "bb")]
    assert output.outputs[0].cumulative_logprob == pytest.approx(-0.25 * 7)
    hidden = complete(engine, "A", SamplingParams(n=1, best_of=4, seed=5))
    assert hidden.outputs[0].text == "cccccc" and hidden.outputs[0].logprobs is None
    assert complete(engine, "A", SamplingParams(n=3, best_of=3, seed=5)).outputs[0].text == "aaaa"


def test_choices_differ_and_a_seed_repeats_them(tiny):
    engine = around(tiny)
    params = SamplingParams(n=4, seed=11, max_tokens=12, ignore_eos=True)
    first, second = complete(engine, "abc", params), complete(engine, "abc", params)
    texts = [tuple(choice.token_ids) for choice in first.outputs]
    assert len(set(texts)) == 4
    assert texts == [tuple(choice.token_ids) for choice in second.outputs]
    alone = complete(around(tiny), "abc", SamplingParams(seed=13, max_tokens=12, ignore_eos=True))
    assert tuple(alone.outputs[0].token_ids) == texts[2], "choice i has seed + i"
    unseeded = SamplingParams(max_tokens=12, ignore_eos=True)
    assert complete(engine, "abc", unseeded).outputs[0] != complete(engine, "abc", unseeded).outputs[0]


def test_cached_prompt_tokens_are_counted_in_whole_pages_and_never_all(tiny):
    engine, prompt = around(tiny), [*range(20)]
    counts = [complete(engine, p).num_cached_tokens for p in (prompt, prompt, [*prompt, 1], prompt[:9], [5])]
    assert counts == [0, 16, 20, 8, 0]
    salted = complete(engine, prompt, cache_salt="mine")
    assert salted.num_cached_tokens == 0, "shared across salts"
    assert counted(engine.metrics, "vllm:prompt_tokens_cached_total") == 44


def test_the_counters_add_up(tiny):
    engine = around(tiny, Scripted({7: said("Hello", END)}))
    params = SamplingParams(seed=7, max_tokens=3)
    complete(engine, "abcd", params)
    complete(engine, "abcd", SamplingParams(seed=7))
    complete(engine, "abcd", SamplingParams(seed=7, max_tokens=0))
    traffic = Traffic(engine)
    traffic.add(Request("gone", [1, 2], params))
    traffic.abort("gone")
    for reason, count in {"length": 2, "stop": 1, "abort": 1, "error": 0}.items():
        assert counted(engine.metrics, "vllm:request_success_total", finished_reason=reason) == count
    assert counted(engine.metrics, "vllm:generation_tokens_total") == 9
    assert counted(engine.metrics, "vllm:prompt_tokens_total") == 14
    assert counted(engine.metrics, "vllm:time_to_first_token_seconds_count") == 2


REFUSED = {
    "empty": ([], {}, "prompt"),
    "out of vocabulary": ([1, 320], {}, "prompt"),
    "negative": ([-1], {}, "prompt"),
    "huge": ([10**40], {}, "prompt"),
    "a fraction": ([1.5], {}, "prompt"),
    "true": ([True], {}, "prompt"),
    "text": (["a"], {}, "prompt"),
    "bias": ([1], {"logit_bias": {320: 1.0}}, "logit_bias"),
    "stop token": ([1], {"stop_token_ids": [10**6]}, "stop_token_ids"),
    "allowed": ([1], {"allowed_token_ids": [320]}, "allowed_token_ids"),
    "nothing left": ([1], {"allowed_token_ids": [97], "bad_words": ["a"]}, "bad_words"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_poisonous_request_is_refused_and_the_engine_goes_on(tiny, case):
    prompt, fields, param = REFUSED[case]
    engine = around(tiny)
    with pytest.raises(RequestError) as refusal:
        engine.prepare(Request("bad", prompt, greedy(**fields)))
    assert refusal.value.param == param and len(str(refusal.value)) < 400
    assert len(complete(engine, "fine").outputs[0].token_ids) == 8


@pytest.mark.parametrize(
    "fields, param",
    [({"cache_salt": 5}, "cache_salt"), ({"priority": "high"}, "priority"), ({"priority": 1}, "priority")],
)
def test_orders_of_the_wrong_kind_are_refused(tiny, fields, param):
    with pytest.raises(RequestError) as refusal:
        around(tiny).prepare(Request("bad", [1], greedy(), **fields))
    assert refusal.value.param == param


@pytest.mark.parametrize(
    "length, max_tokens, fits",
    [(127, 1, True), (128, 1, False), (128, 0, True), (129, 0, False), (127, None, True), (128, None, False),
     (120, 8, True), (120, 9, False), (10_000, 5, False)],
)  # fmt: skip
def test_what_can_never_fit_is_refused_at_once(tiny, length, max_tokens, fits):
    engine = around(tiny, pages=32)  # just room for one such sequence
    request = Request("r", [3] * length, greedy(max_tokens=max_tokens))
    if fits:
        assert len(complete(engine, request.prompt_token_ids, request.params).outputs) == 1
        return
    with pytest.raises(RequestError, match="maximum context length is 128 tokens") as refusal:
        engine.prepare(request)
    assert refusal.value.code == "context_length_exceeded"
    assert f"{length + (1 if max_tokens is None else max_tokens)} tokens" in str(refusal.value)


@pytest.mark.parametrize(
    "keep, max_tokens, kept", [(5, 4, 5), (-1, 28, 100), (-1, None, 127), (500, 4, 110), (-1, 0, 110)]
)
def test_a_prompt_is_truncated_from_its_beginning(tiny, keep, max_tokens, kept):
    prompt = [i % 250 for i in range(max(kept, 110))] + [9]
    params = greedy(truncate_prompt_tokens=keep, max_tokens=max_tokens)
    prepared = around(tiny).prepare(Request("r", prompt, params))
    assert prepared.prompt_token_ids == prompt[-kept:] or (
        kept >= 110 and prepared.prompt_token_ids == prompt
    )


def test_what_happens_to_the_callers_list_does_not_matter(tiny):
    engine, prompt = around(tiny), [*range(30)]
    expected = complete(around(tiny), prompt).outputs[0].token_ids
    prepared = engine.prepare(Request("r", prompt, greedy()))
    prompt[:] = [10**9] * 3
    traffic = Traffic(engine)
    traffic.add(prepared)
    assert traffic.finish()["r"].outputs[0].token_ids == expected


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("n", [1, 3])
def test_an_abort_in_any_state_frees_everything(tiny, steps, n):
    engine = around(tiny, max_num_seqs=2, max_num_batched_tokens=8)
    traffic = Traffic(engine)
    for name in ("a", "b", "c"):
        traffic.add(Request(name, [ord(name)] * 20, greedy(n=n, temperature=1.0, seed=1)))
    for _ in range(steps):
        traffic.step()
    for name in ("b", "a", "c", "c", "never was"):
        traffic.abort(name)
    assert not engine.ongoing
    traffic.finish()
    assert counted(engine.metrics, "vllm:request_success_total", finished_reason="abort") == 3
    assert len(complete(engine, "fine").outputs[0].token_ids) == 8


def test_priority_decides_who_is_served_first(tiny):
    engine = around(tiny, Scripted({}), max_num_seqs=1, scheduling_policy="priority")
    traffic, order = Traffic(engine), []
    for name, priority in (("late", 5), ("first", -3), ("second", 0)):
        traffic.add(Request(name, [1, 2], SamplingParams(max_tokens=3), priority=priority))
    while engine.busy:
        traffic.step()
        order += [name for name in traffic.done if name not in order]
    assert order == ["first", "second", "late"]


def test_a_reset_forgets_everything(tiny):
    engine = around(tiny)
    traffic = Traffic(engine)
    prompt = [*range(40)]
    expected = complete(around(tiny), prompt).outputs[0].token_ids
    traffic.add(Request("a", prompt, greedy()))
    for _ in range(4):
        traffic.step()
    engine.reset()
    check_idle(engine)
    output = complete(engine, prompt)
    assert output.outputs[0].token_ids == expected and output.num_cached_tokens == 0
