"""Experts are placed anew while requests run: devices get even shares, tokens are what they were, nothing waits."""

import json
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.eplb import EplbConfig
from jaxserve.errors import ConfigError
from jaxserve.rebalance import Rebalance
from jaxserve.step import COMPILER_OPTIONS
from jaxserve.topology import mesh_for, with_slots
from tests.engines import SIZES
from tests.jaxserve.models.running import golden_config
from tests.tiny import tiny_checkpoint

E, LAYERS = 16, 2
FIELDS = {
    "num_local_experts": E, "num_experts_per_tok": 2, "experts_per_token": 2, "attention_bias": True,
    "hidden_act": "silu", "swiglu_limit": 7.0,
}  # fmt: skip
FEW = SIZES | {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "compilation_cache_dir": "",
    "enable_prefix_caching": False,
}
MESH = {"data_parallel_size": 8, "enable_expert_parallel": True}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": np.random.default_rng(i).integers(0, 256, 48).tolist()} for i in range(16)]
# For all prompts: three each with 16 tokens of them, and one for each token more; 2 prompts a group.
STEPS = 16


@pytest.fixture(autouse=True)
def compiled_in_little_time(monkeypatch):
    monkeypatch.setitem(COMPILER_OPTIONS, "cpu", {"xla_backend_optimization_level": 0})


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Whose routers prefer experts by Zipf's law, others in each layer."""
    path = tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), "gpt_oss", layers=LAYERS, tokenizer=True, **FIELDS
    )
    tensors = load_file(path / "model.safetensors")
    for layer in range(LAYERS):
        taste = np.random.default_rng(layer).permutation(np.log(1.0 + np.arange(E)))
        tensors[f"model.layers.{layer}.mlp.router.bias"] = -1.5 * taste.astype(np.float32)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def sample(llm: LLM, name: str, **labels: str) -> float:
    metrics = llm.engine.metrics
    found = metrics.registry.get_sample_value(name, {"model_name": llm.engine.config.model} | labels)
    return 0.0 if found is None else found


def most_over_mean(rows: np.ndarray) -> np.ndarray:
    return rows.max(axis=1) / rows.mean(axis=1)


@pytest.mark.supports("eight devices", "experts moved while requests run")
def test_devices_get_even_shares_within_some_steps_and_tokens_never_change(model):
    alone = LLM(model, **FEW)
    expected = tokens(alone)
    counted = alone.expert_loads()
    alone.close()
    llm = LLM(
        model, **FEW, **MESH, enable_eplb=True,
        eplb_config={"window_size": STEPS, "step_interval": 2 * STEPS, "num_redundant_experts": 8},
    )  # fmt: skip
    traffic = llm.engine.experts
    assert tokens(llm) == expected
    np.testing.assert_array_equal(llm.expert_loads(), counted)
    assert counted.sum(axis=1).tolist() == [2 * 16 * (48 + 9)] * LAYERS, (
        "two of every token that was computed"
    )
    before = traffic.totals().devices
    assert most_over_mean(before).min() > 1.4
    for _ in range(20):
        assert tokens(llm) == expected
        if sample(llm, "jaxserve:eplb_rebalances_total", outcome="done"):
            break
        time.sleep(0.5)
    assert sample(llm, "jaxserve:eplb_rebalances_total", outcome="done") == 1
    assert sample(llm, "jaxserve:eplb_moved_bytes_total") > 0
    before = traffic.totals().devices
    assert tokens(llm) == expected
    assert most_over_mean(traffic.totals().devices - before).max() < 1.15
    assert 0 < sample(llm, "jaxserve:eplb_balancedness") <= 1
    assert sample(llm, "jaxserve:expert_load_max_over_mean", layer="1") > 2
    assert sample(llm, "jaxserve:compiles_total") == 0
    llm.close()


def wait_until(true) -> None:
    for _ in range(1000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("not within ten seconds")


def test_a_layer_is_made_only_when_the_one_before_was_taken():
    begun: list[int] = []

    def move(layer, loads):
        begun.append(layer)
        return type("Moved", (), {"layer": layer, "nbytes": 3})() if layer != 1 else None

    job = Rebalance(np.ones((4, 2)), move)
    wait_until(lambda: job.ready)
    assert begun == [0] and job.take().layer == 0 and job.take() is None
    job.go_on()
    wait_until(lambda: job.ready)
    assert begun == [0, 1, 2], "layer 1 stays"
    worked = job.seconds
    time.sleep(0.05)
    assert job.seconds == worked, "waiting for a step is no work"
    job.stop()
    job.thread.join(10)
    assert begun == [0, 1, 2] and (job.layers, job.nbytes) == (1, 3)


def test_copying_that_hangs_or_fails_is_given_up_and_requests_go_on(model):
    small = FEW | {"max_num_seqs": 1, "max_num_batched_tokens": 8}
    settings = {"window_size": 4, "step_interval": 4, "max_seconds": 1}
    llm = LLM(
        model,
        **small,
        data_parallel_size=2,
        enable_expert_parallel=True,
        enable_eplb=True,
        eplb_config=settings,
    )
    rebalancer, released = llm.engine.rebalancer, threading.Event()

    def hangs(layer, loads):
        released.wait(60)

    def fails(layer, loads):
        raise RuntimeError("a device has gone")

    def ended(outcome: str):
        llm.generate("abcd", GREEDY, use_tqdm=False)
        return sample(llm, "jaxserve:eplb_rebalances_total", outcome=outcome)

    rebalancer._planned = hangs
    first = llm.generate("abcd", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    wait_until(lambda: ended("given_up"))
    stuck = rebalancer._given_up
    assert stuck.is_alive()
    rebalancer._planned = fails
    ended("failed")
    assert rebalancer._under_way is None, "nothing new while a thread hangs"
    released.set()
    stuck.join(10)
    wait_until(lambda: ended("failed"))
    assert llm.generate("abcd", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == first
    llm.close()


def config(**settings) -> EngineConfig:
    return EngineConfig("model", **settings)


def test_settings_that_mean_nothing_are_refused_with_those_that_do():
    with pytest.raises(ConfigError, match=r"has window=3, which is unknown; did you mean window_size"):
        config(enable_eplb=True, eplb_config={"window": 3})
    with pytest.raises(ConfigError, match="step_interval=0; use an integer of 1 or more"):
        config(enable_eplb=True, eplb_config={"step_interval": 0})
    with pytest.raises(ConfigError, match="has no effect without enable_eplb"):
        config(eplb_config={"step_interval": 5})
    assert EplbConfig.of(json.loads('{"num_redundant_experts": 32}')) == EplbConfig(num_redundant_experts=32)


def test_places_that_devices_cannot_share_are_refused():
    model = golden_config("qwen3_moe")  # 8 experts

    def placed(**settings):
        asked = config(enable_eplb=True, **settings)
        return with_slots(
            asked,
            model,
            mesh_for(
                config(**{k: v for k, v in settings.items() if k != "nnodes" and k != "eplb_config"}), model
            ),
        )

    with pytest.raises(ConfigError, match="enable_eplb has no effect: no experts of qwen3_moe are on other"):
        placed(tensor_parallel_size=2)
    apart = {"data_parallel_size": 4, "enable_expert_parallel": True}
    with pytest.raises(ConfigError, match=r"3 makes 11 places for the 8 experts .* 4 devices .* use 0, 4, 8"):
        placed(**apart, eplb_config={"num_redundant_experts": 3})
    with pytest.raises(ConfigError, match="of one process, and nnodes=2"):
        placed(**apart, nnodes=2)
    slots = placed(**apart, eplb_config={"num_redundant_experts": 4}).mixture.slots
    assert len(slots) == 12 and set(slots) == set(range(8))
