"""A step in groups of layers is the step: the same tokens, and a group's pages are complete when it says so."""

import jax
import numpy as np
import pytest

from jaxserve.layer_groups import LayerGroup, layer_groups
from sharding.mesh import Topology
from tests.jaxserve.models.running import golden_prompts
from tests.sharding.stepping import Stepping, check_golden


@pytest.mark.parametrize(
    "arch, stacked, topology",
    [
        ("gemma3", False, None),  # windows and ropes differ from layer to layer
        ("gpt_oss", True, None),  # experts, read in the stack
        ("deepseek_v3", True, None),  # a dense layer, then mixtures
        ("deepseek_v3", False, Topology(data=2, expert=2, tensor=2)),
        ("llama", True, Topology(data=2, tensor=2)),
    ],
)
def test_groups_of_layers_give_the_reference_s_tokens(arch, stacked, topology):
    stepping = check_golden(arch, topology, stacked=stacked, steps=3, pieces=4)
    assert len(stepping.runner.layer_groups) > 1


def pages_of(pool, group: LayerGroup) -> list[np.ndarray]:
    """Copies of the pages of these layers."""
    part = jax.tree.leaves(group.of_pool(pool))
    if group.stacked:
        return [np.array(part[0][layer]) for layer in range(group.first, group.first + group.count)]
    return [np.array(pages) for pages in part]


@pytest.mark.parametrize("stacked", [False, True])
def test_pages_are_complete_when_told_and_what_experts_got_is_counted_once(stacked):
    prompt = golden_prompts("deepseek_v3")[-1]["ids"]
    layered = Stepping("deepseek_v3", None, stacked=stacked, pieces=3)
    whole = Stepping("deepseek_v3", None, stacked=stacked)
    told: list[tuple[LayerGroup, list[np.ndarray]]] = []
    outputs = []
    for stepping in (layered, whole):
        stepping.compiled(stepping.buckets[0])
        runner = stepping.runner
        seen = [] if told else told
        rows = [stepping._row(0, prompt, 0)]
        outputs.append(runner.launch(rows, lambda g: seen.append((g, pages_of(runner.pool, g)))).output)  # noqa: B023
    assert [group.first for group, _ in told] == [0, 1, 2]
    for group, pages in told:
        jax.tree.map(np.testing.assert_array_equal, pages, pages_of(layered.runner.pool, group))
        for got, right in zip(pages, pages_of(whole.runner.pool, group), strict=True):
            np.testing.assert_allclose(got[1:], right[1:], atol=1e-4)
            assert np.any(got[1:])
    jax.tree.map(
        np.testing.assert_array_equal,
        *(jax.tree.map(np.asarray, output.expert_loads) for output in outputs),
    )
    np.testing.assert_array_equal(*(np.asarray(output.read) for output in outputs))


def test_groups_are_equal_within_runs_of_equal_layers():
    def sizes(*runs: int, pieces: int = 4) -> list[tuple[int, int]]:
        stacks = [{"q": np.zeros((length, 1), np.int8)} for length in runs]
        groups = layer_groups(stacks, stacked=True, pieces=pieces)
        apart = [{"q": np.zeros(run + 1, np.int8)} for run, length in enumerate(runs) for _ in range(length)]
        listed = layer_groups(apart, stacked=False, pieces=pieces)
        assert [(g.first, g.count, g.run) for g in groups] == [(g.first, g.count, g.run) for g in listed]
        return [(g.first, g.count) for g in groups]

    assert sizes(30) == [(0, 8), (8, 8), (16, 8), (24, 6)]
    assert sizes(3, 58) == [(0, 3), (3, 15), (18, 15), (33, 15), (48, 13)]
    assert sizes(2) == [(0, 1), (1, 1)] and sizes(7, pieces=1) == [(0, 7)]
