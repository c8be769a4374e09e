"""Weights stay in their stored bits on a mesh, each device with its part: the engine gives the reference's tokens."""

import shutil

import jax
import pytest

import jaxserve.build
from jaxserve import LLM, SamplingParams
from jaxserve.runner import DeviceRunner
from jaxserve.step import COMPILER_OPTIONS
from pallas_kernels.formats import QTensor
from tests.jaxserve.models.running import GOLDEN, golden_prompts
from tests.tiny import tiny_tokenizer

SMALL = {  # two steps to compile
    "max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 8, "block_size": 8, "dtype": "float32",
    "num_gpu_blocks_override": 12, "compilation_cache_dir": "",
}  # fmt: skip
MESHES = {
    "deepseek_v3_fp8": {"data_parallel_size": 8, "enable_expert_parallel": True},
    "gpt_oss_mxfp4": {"tensor_parallel_size": 2, "data_parallel_size": 4, "expert_parallel_size": 4},
}


@pytest.mark.supports("quantised checkpoints", "low bits on eight devices")
@pytest.mark.parametrize("arch", MESHES)
def test_greedy_tokens_and_bytes(tmp_path, monkeypatch, arch):
    """As an accelerator would load them: in stacks of layers. Kernels' definitions multiply them here."""
    monkeypatch.setattr(jaxserve.build, "platform", lambda: "tpu")
    monkeypatch.setitem(COMPILER_OPTIONS, "cpu", {"xla_backend_optimization_level": 0})
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / arch / file, tmp_path / file)
    tiny_tokenizer(tmp_path, vocab=512)
    llm = LLM(str(tmp_path), **SMALL, **MESHES[arch])
    prompts = [p for p in golden_prompts(arch) if p["length"] < 40]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p["ids"]} for p in prompts], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [p["greedy"] for p in prompts]
    assert isinstance(llm.engine.runner, DeviceRunner)
    layers = llm.engine.runner.params["layers"]
    leaves = jax.tree.leaves(layers, is_leaf=lambda x: isinstance(x, QTensor))
    experts = [leaf for leaf in leaves if isinstance(leaf, QTensor) and leaf.ndim == 4]
    assert len(experts) == 3 * sum("experts" in layer for layer in layers)
    for w in experts:
        shard = w.codes.addressable_shards[0].data
        assert shard.shape[1] * 4 <= w.codes.shape[1] and w.codes.dtype.itemsize == 1
    llm.close()
