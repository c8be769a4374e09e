"""Mixtures whose checkpoints are in low bits, served over HTTP on one device and on eight: the reference's tokens."""

import shutil

import httpx
import pytest

from jaxserve import AsyncLLM
from jaxserve.step import COMPILER_OPTIONS
from server.config import ServerConfig
from tests.jaxserve.models.running import GOLDEN, golden_prompts
from tests.server.conftest import running
from tests.tiny import tiny_tokenizer

SMALL = {  # two steps to compile
    "max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 8, "block_size": 8,
    "num_gpu_blocks_override": 12, "compilation_cache_dir": "",
}  # fmt: skip
EIGHT = {
    "gpt_oss_mxfp4": {"tensor_parallel_size": 2, "data_parallel_size": 4, "expert_parallel_size": 4},
    "deepseek_v3_fp8": {"data_parallel_size": 8, "enable_expert_parallel": True},
}


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.supports(
    "quantised checkpoints", "gpt-oss in MXFP4 and DeepSeek in FP8 blocks over HTTP, on 1 and 8 devices"
)
@pytest.mark.parametrize("arch", EIGHT)
def test_greedy_tokens(tmp_path, monkeypatch, arch, devices):
    monkeypatch.setitem(COMPILER_OPTIONS, "cpu", {"xla_backend_optimization_level": 0})
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / arch / file, tmp_path / file)
    tiny_tokenizer(tmp_path, vocab=512)
    llm = AsyncLLM(str(tmp_path), **SMALL | (EIGHT[arch] if devices == 8 else {}))
    prompts = [p for p in golden_prompts(arch) if p["length"] < 40]
    body = {
        "prompt": [p["ids"] for p in prompts],
        "temperature": 0,
        "max_tokens": 24,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    try:
        with running(llm, ServerConfig()) as url:
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
    finally:
        llm.close()
    assert [choice["token_ids"] for choice in answer["choices"]] == [p["greedy"] for p in prompts]
