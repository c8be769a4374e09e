"""A cache in low bits in the engine: nothing changes the tokens, a conversation stays near that of a plain cache."""

import jax
import numpy as np
import pytest
from jax.experimental import topologies

from jaxserve import LLM, SamplingParams
from jaxserve.arrays import Arrays
from jaxserve.build import settled
from jaxserve.cache_kernels import check_cache_kernels
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models import ModelConfig
from jaxserve.plan.model import read_config
from jaxserve.request import Request
from jaxserve.step import COMPILER_OPTIONS
from jaxserve.weights.schemes import without_settings
from pallas_kernels.pages import ScaledPages
from tests.engines import Traffic, around, complete, counted, greedy
from tests.jaxserve.models.running import golden_prompts
from tests.pallas_kernels.conftest import tpu_compiler  # noqa: F401
from tests.sharding.test_engine_on_mesh import FEW
from tests.tiny import tiny_checkpoint

LONG = [(i * i * 37 + 11 * i) % 250 for i in range(90)]
CACHES = [
    pytest.param("llama", "int8", marks=pytest.mark.supports("cache", "INT8, grouped queries")),
    pytest.param("deepseek_v3", "fp8", marks=pytest.mark.supports("cache", "FP8, latents")),
    pytest.param("llama", "int4", marks=pytest.mark.supports("cache", "INT4, grouped queries")),
    pytest.param("deepseek_v3", "int4", marks=pytest.mark.supports("cache", "INT4, latents")),
]
SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 8}  # four steps to compile
WAYS = {
    "chunked": {"max_num_batched_tokens": 8},
    "alone": {"max_num_seqs": 1, "async_scheduling": False, "enable_prefix_caching": False},
    "preempted": {"pages": 30},
}


@pytest.fixture
def compiled_in_little_time(monkeypatch):
    monkeypatch.setitem(COMPILER_OPTIONS, "cpu", {"xla_backend_optimization_level": 0})


@pytest.mark.parametrize("arch, dtype", CACHES)
def test_nothing_changes_the_tokens(golden, arch, dtype):
    """Chunks, mates, preemption and cached prefixes: the same tokens, and log-probabilities but for roundings."""
    built = golden(arch, kv_cache_dtype=dtype)
    prompts = [LONG[:n] for n in (5, 40, 41, 80)] + [
        p["ids"] for p in golden_prompts(arch) if p["length"] < 100
    ]
    seen = []
    for way, settings in WAYS.items():
        engine = around(built, **settings)
        traffic = Traffic(engine)
        for again in range(2):  # the second time with what the first has left in the cache
            for i, prompt in enumerate(prompts):
                traffic.add(Request(f"{i} {again}", prompt, greedy(max_tokens=16, logprobs=0)))
            traffic.finish()
        outputs = [traffic.done[f"{i} {again}"] for again in range(2) for i in range(len(prompts))]
        assert (counted(engine.metrics, "vllm:num_preemptions_total") > 0) == (way == "preempted")
        assert (counted(engine.metrics, "vllm:prefix_cache_hits_total") > 0) == (way != "alone")
        seen.append([(o.outputs[0].token_ids, _logprobs(o)) for o in outputs])
    for other in seen[1:]:
        for (tokens, logprobs), (others, other_logprobs) in zip(seen[0], other, strict=True):
            assert tokens == others
            np.testing.assert_allclose(logprobs, other_logprobs, atol=0.02)


def _logprobs(output) -> list[float]:
    return [next(iter(entry.values())).logprob for entry in output.outputs[0].logprobs]


@pytest.mark.usefixtures("compiled_in_little_time")
@pytest.mark.parametrize("arch, dtype", CACHES)
def test_many_turns_stay_near_a_plain_cache(golden, arch, dtype):
    """Each turn finds the turns before it in pages of 8 bits; a plain engine judges what was said in the end."""
    engine, plain = around(golden(arch, kv_cache_dtype=dtype, **SMALL)), around(golden(arch, **SMALL))
    said, turns = list(LONG[:12]), []
    for turn in range(6):
        output = complete(engine, said, greedy(max_tokens=8, logprobs=0))
        assert (output.num_cached_tokens or 0) >= len(said) - 16 or turn == 0
        turns.append((len(said), _logprobs(output)))
        said += [*output.outputs[0].token_ids, *LONG[12 + 8 * turn : 20 + 8 * turn]]
    judged = complete(plain, said, greedy(max_tokens=1, prompt_logprobs=0)).prompt_logprobs
    off = [
        np.mean([abs(mine - judged[start + i][said[start + i]].logprob) for i, mine in enumerate(logprobs)])
        for start, logprobs in turns
    ]
    most = {"int8": 0.2, "fp8": 0.8, "int4": 3.0 if arch == "deepseek_v3" else 1.2}  # where experts change
    assert max(off) < most[dtype], off  # nonsense would be off by several
    assert 0 < np.mean(off[3:]) < 2 * np.mean(off[:3]) + 0.1, f"later turns are worse: {off}"


@pytest.mark.usefixtures("compiled_in_little_time")
@pytest.mark.supports("cache", "FP8 and INT4 on meshes, long prompts over the context axis too")
@pytest.mark.parametrize("cache", ["fp8", "int4"])
def test_eight_devices_give_the_tokens_of_one(cache, tmp_path):
    """Scales are divided as their pages are; a prompt spread over devices sees what the pages will hold."""
    model = str(tiny_checkpoint(tmp_path, tokenizer=True))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    meshes = (
        {},
        {"tensor_parallel_size": 4, "data_parallel_size": 2},
        {"prefill_context_parallel_size": 8},
    )
    answers = []
    for settings in meshes:
        llm = LLM(model, **FEW, **settings, kv_cache_dtype=cache)
        outputs = llm.generate(
            [{"prompt_token_ids": LONG[:n]} for n in (5, 24, 60, 90)], params, use_tqdm=False
        )
        assert all(isinstance(pages, ScaledPages) for pages in llm.engine.runner.pool)  # type: ignore[attr-defined]
        llm.close()
        answers.append([o.outputs[0].token_ids for o in outputs])
    assert answers[0] == answers[1] == answers[2]


def test_a_token_of_latents_takes_what_its_bits_do_and_scales():
    config = ModelConfig.from_hf(without_settings(read_config("deepseek-v3")))
    tokens = {"fp8": 576 + 4, "int8": 576 + 4, "int4": 256 + 64 + 9 * 4, "bfloat16": 2 * 576}
    for dtype, token in tokens.items():
        settings = settled(EngineConfig("m", dtype="bfloat16", kv_cache_dtype=dtype, block_size=64), config)
        assert Arrays(settings, config, {}, True).page_bytes == 61 * 64 * token


@pytest.mark.parametrize(
    "model, settings, words",
    [
        ("llama-3.1-8b", {"kv_cache_dtype": "fp8"}, None),
        ("llama-3.1-8b", {"kv_cache_dtype": "int8"}, None),
        ("llama-3.1-8b", {"kv_cache_dtype": "int4"}, None),
        ("deepseek-v3", {"kv_cache_dtype": "int4"}, "kv_cache_dtype=int4 .* cannot be used .* float8_e4m3fn"),
        ("deepseek-v3", {"kv_cache_dtype": "fp8"}, None),
        (
            "llama-3.1-8b",
            {"kv_cache_dtype": "fp8_e5m2"},
            "kv_cache_dtype=fp8_e5m2 .* cannot be used .* float8_e4m3fn or int8",
        ),
        ("deepseek-v3", {"kv_cache_dtype": "int8"}, "kv_cache_dtype=int8 .* float8_e4m3fn"),
        ("deepseek-v3", {"kv_cache_dtype": "fp8", "block_size": 128}, "block_size=128 .* multiple of 256"),
        ("llama-3.1-8b", {"kv_cache_dtype": "int8", "block_size": 16}, "block_size=16 .*page size 16"),
    ],
)
def test_a_tpu_takes_what_its_kernels_take(tpu_compiler, model, settings, words):  # noqa: F811
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = jax.sharding.Mesh(np.array(devices[:1]), ("data",))
    config = ModelConfig.from_hf(without_settings(read_config(model)))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        asked = settled(EngineConfig("m", dtype="bfloat16", **settings), config)
        if words is None:
            check_cache_kernels(asked, config, mesh)
        else:
            with pytest.raises(ConfigError, match=words):
                check_cache_kernels(asked, config, mesh)
