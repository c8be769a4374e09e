"""Nothing but the tokens decides the answer: not chunks, batch mates, padding, or how layers are stored."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.jaxserve.models.running import GOLDEN, Run, golden_config, golden_params, golden_prompts, stacked

# What depends on position or layer, each once.
ARCHS = ["llama", "ministral3", "gemma2", "gemma3", "gpt_oss", "deepseek_v3"]


def assert_same(got: np.ndarray, expected: np.ndarray):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)


def longest_prompt(arch: str) -> list[int]:
    return max(golden_prompts(arch), key=lambda p: p["length"])["ids"][:100]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("sizes", [(1, 99), (17, 16, 16, 51), (64, 1, 1, 34)])
def test_chunks_of_a_prompt_give_the_logits_of_the_whole(arch, sizes):
    config, prompt = golden_config(arch), longest_prompt(arch)
    params = golden_params(arch, config)
    whole = Run(config, params).step({0: prompt})
    run, at = Run(config, params), 0
    for size in sizes:
        got = run.step({0: prompt[at : at + size]})
        assert_same(got, whole[at : at + size])
        at += size


@pytest.mark.parametrize("arch", ARCHS)
def test_batch_mates_do_not_change_the_logits(arch):
    config, prompt = golden_config(arch), longest_prompt(arch)
    params = golden_params(arch, config)
    prompts = [prompt[:5], prompt[10:47], prompt[30:31], prompt]
    crowd = Run(config, params, sequences=4)
    first = crowd.step({0: prompts[0], 1: prompts[1], 3: prompts[3][:40]})
    second = crowd.step({0: [7], 1: [8], 2: prompts[2], 3: prompts[3][40:]})
    third = crowd.step({b: [9] for b in range(4)})
    for b, (prompt_b, extra) in enumerate(zip(prompts, ([7, 9], [8, 9], [9], [9]), strict=True)):
        alone = Run(config, params).step({0: prompt_b + extra})
        assert_same(third[b], alone[-1])
        if b == 1:
            assert_same(first[5:42], alone[:37])
            assert_same(second[1], alone[37])


@pytest.mark.parametrize("arch", ARCHS)
def test_a_stack_of_layers_is_scanned_to_the_same_logits(arch):
    config, prompt = golden_config(arch), longest_prompt(arch)
    params = golden_params(arch, config)
    loop, scan = Run(config, params), Run(config, stacked(params), stack=True)
    for chunk in (prompt[:60], prompt[60:61], prompt[61:]):
        assert_same(scan.step({0: chunk}), loop.step({0: chunk}))


@pytest.mark.parametrize("arch", ["llama", "gemma3", "olmo2"])
def test_bfloat16_stays_near_float32(arch):
    config = golden_config(arch)
    prompt = max(golden_prompts(arch), key=lambda p: p["length"])
    run = Run(config, golden_params(arch, config, jnp.bfloat16), dtype=jnp.bfloat16)
    inside = run.inside({0: prompt["ids"]})
    logits = inside["logits"]
    assert inside["hidden"].dtype == jnp.bfloat16 and logits.dtype == np.float32
    expected = np.load(GOLDEN / arch / "logits.npz")[f"logits_{prompt['length']}"]
    assert np.mean(np.abs(logits - expected)) < 0.15
    assert np.mean(logits.argmax(-1) == expected.argmax(-1)) >= 0.9
