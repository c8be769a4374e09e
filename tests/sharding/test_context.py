"""A prompt longer than one step's tokens is computed by several devices together, with the same answers."""

import shutil

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.runner import DeviceRunner
from sharding.context import stripes
from tests.engines import SIZES
from tests.jaxserve.models.running import GOLDEN, golden_config, golden_prompts
from tests.tiny import tiny_checkpoint, tiny_tokenizer

SMALL = SIZES | {"max_num_seqs": 1, "compilation_cache_dir": ""}
ASKED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=0)
PROMPTS = [
    "the quick brown fox jumps over the lazy dog " * 2,
    "short",
    "pack my box with five dozen liquor jugs " * 2,
]


def watched(llm: LLM) -> list[int]:
    """How many devices computed each step's prompt together, as steps are launched from now on."""
    runner, seen = llm.engine.runner, []
    assert isinstance(runner, DeviceRunner)
    packed = runner.packed

    def watching(rows):
        bucket, flat = packed(rows)
        seen.append(bucket.spread)
        return bucket, flat

    runner.packed = watching
    return seen


def scores(output) -> list[float]:
    return [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]


@pytest.mark.supports("many devices", "a long prompt over devices, grouped-query attention")
def test_a_prompt_over_four_pairs_of_devices_is_that_of_one_device(tmp_path):
    model = str(tiny_checkpoint(tmp_path, tokenizer=True))
    alone = LLM(model, **SMALL)
    expected, states = alone.generate(PROMPTS, ASKED, use_tqdm=False), alone.hidden_states(PROMPTS[:1])
    alone.close()
    llm = LLM(model, **SMALL, prefill_context_parallel_size=4, tensor_parallel_size=2)
    seen = watched(llm)
    found = llm.generate(PROMPTS, ASKED, use_tqdm=False)
    assert seen.count(4) == 2, "both long prompts"
    for mine, theirs in zip(expected, found, strict=True):
        assert theirs.outputs[0].token_ids == mine.outputs[0].token_ids
        np.testing.assert_allclose(scores(theirs), scores(mine), atol=1e-4)
    again = llm.generate(
        PROMPTS[:1], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False
    )
    assert again[0].num_cached_tokens > 64 and again[0].outputs[0].token_ids == found[0].outputs[0].token_ids
    np.testing.assert_allclose(llm.hidden_states(PROMPTS[:1])[0], states[0], atol=1e-4)
    assert seen.count(4) == 3
    llm.close()


@pytest.mark.supports("many devices", "a long prompt over devices, latent attention and experts")
def test_latents_and_experts_over_the_same_devices(tmp_path):
    arch = "deepseek_v2_lite"
    shutil.copytree(GOLDEN / arch, tmp_path / arch)
    tiny_tokenizer(tmp_path / arch)
    sizes = SMALL | {"max_model_len": 160, "max_num_batched_tokens": 40, "block_size": 8}
    llm = LLM(str(tmp_path / arch), **sizes, prefill_context_parallel_size=4, enable_expert_parallel=True)
    seen, prompts = watched(llm), golden_prompts(arch)
    outputs = llm.generate([p["ids"] for p in prompts], ASKED, use_tqdm=False)
    assert seen.count(4) == 1, "one prompt is longer than 40 tokens"
    assert [o.outputs[0].token_ids for o in outputs] == [p["greedy"][:6] for p in prompts]
    llm.close()


@pytest.mark.parametrize("length", [1, 7, 8, 31, 32])
def test_every_position_is_on_one_device_and_first_rows_are_real(length):
    held = stripes(length, 4, 8)
    assert sorted(np.concatenate(held).tolist()) == list(range(length))
    assert all((np.diff(positions) > 0).all() for positions in held)


@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(arch, marks=pytest.mark.supports("many devices", f"a long prompt over devices, {what}"))
        for arch, what in (("gemma2", "windows and soft cap"), ("gpt_oss", "windows and sinks"))
    ],
)
def test_windows_soft_caps_and_sinks_go_round_the_ring(tmp_path, arch):
    """A prompt longer than the windows; the scores of all its tokens, too, are those of the golden."""
    shutil.copytree(GOLDEN / arch, tmp_path / arch)
    tiny_tokenizer(tmp_path / arch)
    sizes = SMALL | {"max_model_len": 160, "max_num_batched_tokens": 40, "block_size": 8}
    llm = LLM(str(tmp_path / arch), **sizes, prefill_context_parallel_size=4, tensor_parallel_size=2)
    seen, prompt = watched(llm), golden_prompts(arch)[-1]
    (output,) = llm.generate([prompt["ids"]], ASKED, use_tqdm=False)
    llm.close()
    assert seen.count(4) == 1 and 0 < max(golden_config(arch).windows) < 40
    assert output.outputs[0].token_ids == prompt["greedy"][:6]
    logits = np.load(GOLDEN / arch / "logits.npz")[f"logits_{prompt['length']}"].astype(np.float64)
    logprobs = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    expected = logprobs[np.arange(prompt["length"] - 1), prompt["ids"][1:]]
    np.testing.assert_allclose(scores(output), expected, atol=1e-3)
