"""Mixtures of experts and latent attention on eight devices: the real step gives the goldens' answers on any mesh."""

import pytest

from sharding.mesh import Topology
from tests.sharding.stepping import check_golden

MESHES = {
    "qwen3_moe": Topology(expert=2, tensor=4),  # one kv head, which four devices keep
    "mixtral": Topology(data=2, expert=2, tensor=2),
    "glm4_moe": Topology(expert=8),
    "gpt_oss": Topology(tensor=8),  # every expert divided, biases and sinks too
    "deepseek_v2": Topology(expert=8),
    "deepseek_v2_lite": Topology(expert=4, tensor=2),
    "deepseek_v3": Topology(data=2, expert=2, tensor=2),
    "kimi_k2": Topology(expert=8),
}


@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=pytest.mark.supports("eight devices", a)) for a in MESHES]
)
def test_log_probabilities_and_greedy_tokens(arch):
    """And rows go to experts by an all-to-all; where nothing but experts is divided, no tokens are gathered."""
    topology = MESHES[arch]
    for text in check_golden(arch, topology).texts.values():
        lines = text.splitlines()
        sent = [line for line in lines if " all-to-all(" in line and "f32" in line]
        assert bool(sent) == (topology.expert is not None), "rows of activations travel"
        if topology.tensor == 1:
            gathered = [line for line in lines if " all-gather(" in line]
            assert all("s32[" in line.split(" all-gather(")[0] for line in gathered), (
                "only counts are gathered"
            )


def test_layers_in_stacks_as_accelerators_have_them():
    check_golden("deepseek_v2_lite", Topology(expert=8), stacked=True, steps=3)
