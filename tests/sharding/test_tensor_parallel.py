"""A model divided over eight devices computes what one device does: the goldens' logits and greedy tokens."""

import jax
import numpy as np
import pytest

from sharding.mesh import Topology
from tests.jaxserve.models.running import GOLDEN, golden_config, golden_prompts
from tests.sharding.meshed import MeshRun, golden_params_on, mesh_for

ARCHS = ["llama", "mistral", "ministral3", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "olmo3"]
MESHES = [(arch, 2) for arch in ARCHS] + [("qwen3", 4), ("olmo2", 4)]  # two kv heads and four; four of each


@pytest.mark.parametrize("arch, tensor", MESHES)
def test_logits_and_greedy_tokens(arch, tensor):
    config = golden_config(arch)
    mesh = mesh_for(config, Topology(tensor=tensor))
    expected = np.load(GOLDEN / arch / "logits.npz")
    prompt = next(p for p in golden_prompts(arch) if p["length"] == 130)
    with jax.set_mesh(mesh):
        run = MeshRun(config, golden_params_on(mesh, arch, config), mesh=mesh)
        logits = run.step({0: prompt["ids"]})
        np.testing.assert_allclose(logits, expected["logits_130"], rtol=1e-4, atol=5e-4)
        for token in prompt["greedy"][:6]:
            assert int(np.argmax(logits[-1])) == token
            logits = run.step({0: [token]})
