"""Every architecture computes what its reference implementation computed: logits, hidden states, greedy tokens."""

from dataclasses import replace

import numpy as np
import pytest

from tests.jaxserve.models.running import GOLDEN, Run, golden_config, golden_params, golden_prompts

MIXTURES = [
    "qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "kimi_k2",
]  # fmt: skip
ARCHS = ["llama", "mistral", "ministral3", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "olmo3", *MIXTURES]
SUPPORTED = [pytest.param(arch, marks=pytest.mark.supports("models", arch)) for arch in ARCHS]


@pytest.mark.parametrize("arch", SUPPORTED)
def test_logits_and_greedy_tokens(arch):
    config = golden_config(arch)
    params, expected = golden_params(arch, config), np.load(GOLDEN / arch / "logits.npz")
    for prompt in golden_prompts(arch):
        run, length = Run(config, params), prompt["length"]
        logits = run.step({0: prompt["ids"]})
        np.testing.assert_allclose(logits, expected[f"logits_{length}"], rtol=1e-4, atol=5e-4)
        steps = expected[f"greedy_logits_{length}"]
        np.testing.assert_allclose(logits[-1], steps[0], rtol=1e-4, atol=5e-4)
        for i, token in enumerate(prompt["greedy"]):
            assert int(np.argmax(logits[-1])) == token
            if i + 1 < len(prompt["greedy"]):
                logits = run.step({0: [token]})
                np.testing.assert_allclose(logits[0], steps[i + 1], rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize("arch", SUPPORTED)
def test_hidden_states_of_every_layer_and_sub_block(arch):
    config = golden_config(arch)
    expected = np.load(GOLDEN / arch / "hidden_37.npz")
    prompt = next(p for p in golden_prompts(arch) if p["length"] == 37)
    inside = Run(config, golden_params(arch, config)).inside({0: prompt["ids"]})
    np.testing.assert_allclose(inside["embed"], expected["embed_tokens"], rtol=1e-4, atol=2e-4)
    for i in range(config.num_layers):
        for ours, theirs in (("attention", ".self_attn"), ("mlp", ".mlp"), ("layers", "")):
            np.testing.assert_allclose(
                inside[ours][i], expected[f"layer_{i}{theirs}"], rtol=1e-4, atol=2e-4, err_msg=f"{ours} {i}"
            )
    np.testing.assert_allclose(inside["hidden"], expected["final_norm"], rtol=1e-4, atol=2e-4)
    if config.mixture:
        assert_routed_alike(inside, expected, [i for i, on in enumerate(config.mixture.layers) if on])


@pytest.mark.parametrize("arch", SUPPORTED)
def test_both_styles_of_config_say_the_same(arch):
    old, new = golden_config(arch), golden_config(arch, "config_v5.json")
    assert old == replace(new, name=old.name)  # transformers writes kimi_k2 as the deepseek_v3 that it is


def assert_routed_alike(inside, expected, layers: list[int]) -> None:
    for row, i in enumerate(layers):
        ids, weights = inside["router_experts"][row], inside["router_weights"][row]
        order = np.argsort(ids, axis=1)
        np.testing.assert_array_equal(
            np.take_along_axis(ids, order, 1), expected[f"layer_{i}.router_experts"]
        )
        np.testing.assert_allclose(
            np.take_along_axis(weights, order, 1), expected[f"layer_{i}.router_weights"], rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(
            inside["router_logits"][row], expected[f"layer_{i}.router_logits"], rtol=1e-4, atol=2e-4
        )
        counts = np.bincount(ids.ravel(), minlength=inside["expert_loads"].shape[1])
        np.testing.assert_array_equal(inside["expert_loads"][row], counts)  # padding rows count nowhere
