"""LLM: vLLM's names and shapes, any form of prompt, and usable again after whatever went wrong."""

import gc
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

import jaxserve.llm
from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.build import Built, _count_when_warm
from jaxserve.errors import EngineError, RequestError
from jaxserve.layered_step import BEGIN, LAST, SAMPLE
from jaxserve.metrics import Metrics
from jaxserve.request import CompletionOutput, RequestOutput
from jaxserve.runner import DeviceRunner
from tests.engines import around, check_idle, complete, greedy, with_weights
from tests.jaxserve.models.running import Run

IDS = [*range(40, 52)]
FEW_STEPS = {
    "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 8, "block_size": 8,
    "num_gpu_blocks_override": 12, "compilation_cache_dir": "",
}  # fmt: skip


@pytest.fixture
def llm(tiny, monkeypatch):
    """An LLM on the shared model; `build` is what would take the time."""

    def rebuilt(config: EngineConfig, metrics: Metrics) -> Built:
        engine = around(tiny)
        engine.metrics = metrics
        return replace(tiny, engine=engine)

    monkeypatch.setattr(jaxserve.llm, "build", rebuilt)
    return LLM("tiny")


def ids_of(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


@pytest.mark.supports("Python API", "generate")
def test_an_output_has_vllms_shape(llm):
    params = greedy(logprobs=2, prompt_logprobs=1, n=2, temperature=1.0, seed=3)
    (output,) = llm.generate("Hello", params, use_tqdm=False)
    assert isinstance(output, RequestOutput) and output.finished
    assert output.prompt == "Hello" and output.prompt_token_ids == [*b"Hello"]
    assert output.prompt_logprobs[0] is None and output.prompt_logprobs[1][ord("e")].logprob < 0
    assert [choice.index for choice in output.outputs] == [0, 1]
    for choice in output.outputs:
        assert isinstance(choice, CompletionOutput) and choice.finish_reason == "length"
        assert choice.text == llm.tokenizer.decode(choice.token_ids)
        assert len(choice.logprobs) == len(choice.token_ids) == 8
        entry = choice.logprobs[0][choice.token_ids[0]]
        assert entry.rank >= 1 and entry.decoded_token is not None
        chosen = [row[token].logprob for row, token in zip(choice.logprobs, choice.token_ids, strict=True)]
        assert choice.cumulative_logprob == pytest.approx(sum(chosen))


def test_any_form_of_prompt_is_taken(llm):
    expected = ids_of(llm.generate("Hello", greedy(), use_tqdm=False)[0])
    ids = [*b"Hello"]
    forms = [
        ids, tuple(ids), np.array(ids), {"prompt": "Hello"}, {"prompt_token_ids": ids},
        {"prompt": "shown", "prompt_token_ids": ids}, {"prompt": "Hello", "prompt_token_ids": None},
    ]  # fmt: skip
    for form in forms:
        (output,) = llm.generate(form, greedy(), use_tqdm=False)
        assert ids_of(output) == expected
        assert all(type(token) is int for token in output.prompt_token_ids)
    outputs = llm.generate(["Hello", *forms, "Bye"], greedy(), use_tqdm=False)
    assert [ids_of(output) == expected for output in outputs] == [True] * 8 + [False]
    assert outputs[6].prompt == "shown" and outputs[1].prompt is None
    assert llm.generate([], greedy()) == []


def test_each_prompt_may_have_its_own_params_and_order_is_kept(llm):
    params = [greedy(max_tokens=n) for n in (9, 1, 5)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(ids_of(output)) for output in outputs] == [9, 1, 5]
    assert len(llm.generate("a", use_tqdm=False)[0].outputs[0].token_ids) <= 16


def test_the_progress_bar_does_not_disturb(llm, capsys):
    quiet = llm.generate("a", greedy(), use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    assert ids_of(llm.generate("a", greedy())[0]) == ids_of(quiet[0])


REFUSED = [
    ("", None, "prompt"), ([[]], None, "prompt"), ([5, 10**6], None, "prompt"), ([[1.5]], None, "prompt"),
    ({"text": "a"}, None, "prompts"), ({}, None, "prompts"), ([None], None, "prompts"), ([3.5], None, "prompts"),
    (["a", "b"], [SamplingParams()], "sampling_params"), (["a"], [], "sampling_params"),
    ([[7] * 500], None, "messages"), ("a", SamplingParams(stop_token_ids=[10**6]), "stop_token_ids"),
]  # fmt: skip


@pytest.mark.parametrize("prompts, params, param", REFUSED)
def test_what_cannot_be_served_is_refused_before_anything_runs(llm, prompts, params, param):
    with pytest.raises(RequestError) as refusal:
        llm.generate(prompts, params, use_tqdm=False)
    assert refusal.value.param == param
    check_idle(llm.engine)


@pytest.mark.supports("Python API", "chat")
def test_chat_applies_the_models_template(llm):
    talk = [{"role": "user", "content": "Hi <|im_end|>"}]
    (output,) = llm.chat(talk, greedy(), use_tqdm=False)
    ids, text = llm.tokenizer.encode_chat(talk)
    assert (output.prompt, output.prompt_token_ids) == (text, ids)
    assert ids_of(output) == ids_of(llm.generate(ids, greedy(), use_tqdm=False)[0])
    assert ids.count(259) == 1, "content forged a turn"
    two = llm.chat([talk, [*talk, {"role": "assistant", "content": "x"}, *talk]], greedy(), use_tqdm=False)
    assert ids_of(two[0]) == ids_of(output) and len(two[1].prompt_token_ids) > len(ids)
    (bare,) = llm.chat(talk, greedy(), use_tqdm=False, add_generation_prompt=False)
    assert bare.prompt_token_ids == ids[: len(bare.prompt_token_ids)] != ids
    (own,) = llm.chat(talk, greedy(), use_tqdm=False, chat_template="{{ messages[0].content }}!")
    assert own.prompt == "Hi <|im_end|>!"


@pytest.mark.supports("Python API", "score")
def test_a_score_is_what_prompt_logprobs_say(llm):
    scores = llm.score(["The", IDS], ["re", [1, 2, 3]])
    for prompt, rest, score in (([*b"The"], [*b"re"], scores[0]), (IDS, [1, 2, 3], scores[1])):
        (output,) = llm.generate([[*prompt, *rest]], greedy(prompt_logprobs=0), use_tqdm=False)
        told = output.prompt_logprobs[len(prompt) :]
        expected = [row[token].logprob for row, token in zip(told, rest, strict=True)]
        assert score.token_logprobs == pytest.approx(expected, abs=1e-4)
        assert score.logprob == pytest.approx(sum(expected), abs=1e-4) and score.token_ids == rest
    (greedy_rest,) = llm.generate([IDS], greedy(), use_tqdm=False)
    assert llm.score([IDS], [ids_of(greedy_rest)])[0].is_greedy and not scores[1].is_greedy


@pytest.mark.parametrize("args", [(["a", "b"], ["c"]), (["a"], [""]), (["a"], [[10**6]])])
def test_a_score_of_nothing_is_refused(llm, args):
    with pytest.raises(RequestError):
        llm.score(*args)


def test_a_score_may_fill_the_whole_context(llm):
    assert len(llm.score([[1] * 100], [[2] * 28])[0].token_logprobs) == 28
    with pytest.raises(RequestError):
        llm.score([[1] * 100], [[2] * 29])


@pytest.mark.supports("Python API", "hidden states")
def test_hidden_states_are_the_forward_pass(llm, tiny):
    expected = Run(tiny.model_config, tiny.engine.runner.params).inside({0: IDS})["hidden"]
    for _ in range(2):  # also when the prompt is in the cache
        one, other = llm.hidden_states([IDS, "Hi"])
        assert one.shape == (12, 32) and one.dtype == np.float32 and other.shape == (2, 32)
        np.testing.assert_allclose(one, expected, atol=2e-4)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("where", ["before the launch", "in the launch", "while reading"])
def test_after_an_interruption_it_can_be_used_again(llm, failure, where):
    prompts = ["one two three four five", "six", "seven"]
    expected = [ids_of(output) for output in llm.generate(prompts, greedy(), use_tqdm=False)]
    with pytest.MonkeyPatch.context() as patch:
        _interrupt(patch, llm, failure, where)
        with pytest.raises(failure):
            llm.generate(prompts, greedy(), use_tqdm=False)
    check_idle(llm.engine)
    assert [ids_of(output) for output in llm.generate(prompts, greedy(), use_tqdm=False)] == expected


def _interrupt(patch, llm, failure, where: str) -> None:
    """Let `failure` come the fifth time; in the launch, when the pages given to a program are gone for good."""
    runner, steps = llm.engine.runner, iter(range(100))

    def failing(function, after: bool):
        def call(*args):
            late = next(steps) >= 4
            if late and not after:
                raise failure
            result = function(*args)
            if late:
                raise failure
            return result

        return call

    if where == "before the launch":
        patch.setattr(llm.engine, "_launch", failing(llm.engine._launch, after=False))
    elif where == "while reading":
        patch.setattr(llm.engine, "_advance", failing(llm.engine._advance, after=True))
    else:
        for step in runner._compiled.values():
            for name in step._programs.keys() - {BEGIN, LAST, SAMPLE}:
                patch.setitem(step._programs, name, failing(step._programs[name], after=True))


def test_logits_that_are_not_finite_are_an_error_not_a_text(tiny, llm):
    params = tiny.engine.runner.params
    llm.engine.runner = with_weights(tiny, params | {"embed": params["embed"].at[300].set(np.nan)})
    with pytest.raises(EngineError, match="not finite"):
        llm.generate([[300, 1], [5]], greedy(), use_tqdm=False)
    assert ids_of(llm.generate([[5]], greedy(), use_tqdm=False)[0]) == ids_of(complete(around(tiny), [5]))


def test_nothing_is_kept_of_what_was_served(llm):
    for _ in range(3):
        llm.generate(["a", "b"], greedy(max_tokens=2), use_tqdm=False)
    assert len(llm.engine.started) <= 2 and not llm.engine.ongoing


def test_closing_twice_does_no_harm(llm):
    llm.close()
    llm.close()


def test_a_closed_engine_answers_nothing(llm):
    llm.close()
    for ask in (
        lambda: llm.generate("a", greedy(), use_tqdm=False),
        lambda: llm.chat([{"role": "user", "content": "a"}], greedy(), use_tqdm=False),
        lambda: llm.score("a", "b"),
        lambda: llm.hidden_states("a"),
    ):
        with pytest.raises(EngineError, match="the engine is closed"):
            ask()


def test_settings_are_refused_by_name():
    with pytest.raises(TypeError, match="max_seqs"):
        LLM("tiny", max_seqs=3)
    with pytest.raises(TypeError, match="dtype"):
        LLM(EngineConfig("tiny"), dtype="float32")


SCRIPT = """
import asyncio
from jaxserve import AsyncLLM, Request, SamplingParams

llm = AsyncLLM({path!r}, max_num_seqs=8, max_num_batched_tokens=64, compilation_cache_dir="")

async def main():
    delta = await anext(llm.submit(Request("r", [5], SamplingParams(max_tokens=None, ignore_eos=True))))
    print(len(delta.token_ids), llm.config.max_model_len, llm._engine.runner.warm.is_set())

asyncio.run(main())
"""


@pytest.mark.parametrize("warm", [True, False], ids=["all compiled", "still compiling"])
def test_a_closed_engine_keeps_neither_weights_nor_programs(tiny, warm):
    """A program that tries one model after another would run out of memory."""
    llm = LLM(tiny.config.model, **FEW_STEPS)
    runner = llm.engine.runner
    assert isinstance(runner, DeviceRunner)
    if warm:
        assert runner.warm.wait(60)
    held = weakref.ref(runner)
    llm.close()
    del llm, runner
    gc.collect()
    assert held() is None


def test_a_program_that_ends_without_closing_ends_well(tmp_path, tiny):
    """In the middle of a request, and of compiling: an interpreter that leaves XLA at work crashes."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(path=tiny.config.model)], capture_output=True, text=True, timeout=280,
        cwd=Path(__file__).parents[2], env={"JAX_PLATFORMS": "cpu", "PATH": "", "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["1", "512", "False"]


def test_the_weights_go_when_the_model_goes(tiny):
    """Neither the count of compiles nor the exit handler keeps a runner."""
    runner = with_weights(tiny, jax.tree.map(lambda x: x + 0, tiny.engine.runner.params))
    metrics = Metrics(CollectorRegistry(), "tiny")
    _count_when_warm(runner, metrics)
    gone = weakref.ref(runner)
    del runner
    gc.collect()
    assert gone() is None
