"""An engine on eight devices gives the answers of an engine on one: tokens, draws, log-probabilities and states."""

import jax
import numpy as np
import pytest

from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.errors import ConfigError
from jaxserve.groups import GroupedScheduler
from jaxserve.runner import DeviceRunner
from jaxserve.topology import mesh_for, topology_for, with_dispatch
from sharding.mesh import Topology
from tests.engines import SIZES
from tests.jaxserve.models.running import golden_config
from tests.tiny import tiny_checkpoint

PROMPTS = ["hello there", "abc", "the quick brown fox jumps over the lazy dog " * 2, "zzz", "12345", "q"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1)
DRAWN = SamplingParams(
    temperature=1,
    top_p=0.9,
    top_k=40,
    seed=3,
    presence_penalty=0.5,
    logit_bias={70: 2.0},
    max_tokens=8,
    ignore_eos=True,
)

# Four steps to compile.
FEW = SIZES | {"max_num_seqs": 2, "max_num_batched_tokens": 8, "compilation_cache_dir": ""}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True))


def config(**settings) -> EngineConfig:
    return EngineConfig("model", **settings)


def answers(model: str, **mesh: int):
    llm = LLM(model, **FEW, **mesh)
    outputs = [llm.generate(PROMPTS, params, use_tqdm=False) for params in (GREEDY, DRAWN)]
    states = llm.hidden_states(PROMPTS)
    llm.close()
    return outputs, states, llm


def scores(output) -> list[float]:
    return [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]


def test_heads_and_sequences_divided_at_once(model):
    """Two groups of four devices; two kv heads, each kept by two of them."""
    (first, drawn), states, _ = answers(model)
    (other, others), other_states, llm = answers(model, tensor_parallel_size=4, data_parallel_size=2)
    for mine, theirs in zip([*first, *drawn], [*other, *others], strict=True):
        assert theirs.outputs[0].token_ids == mine.outputs[0].token_ids
    for mine, theirs in zip(first, other, strict=True):
        np.testing.assert_allclose(scores(theirs), scores(mine), atol=1e-4)
    for mine, theirs in zip(states, other_states, strict=True):
        np.testing.assert_allclose(theirs, mine, atol=1e-4)
    assert sum(o.num_cached_tokens for o in others) == sum(o.num_cached_tokens for o in drawn) > 0
    assert isinstance(llm.engine.scheduler, GroupedScheduler)
    assert all(group.cache.cached for group in llm.engine.scheduler.groups), "both had sequences"


def test_every_device_holds_its_part_of_weights_and_pages(model):
    llm = LLM(model, **FEW, tensor_parallel_size=2)
    runner = llm.engine.runner
    assert isinstance(runner, DeviceRunner)
    held = {
        device: sum(shard.data.nbytes for leaf in jax.tree.leaves(runner.params) for shard in leaf.addressable_shards
                    if shard.device == device)
        for device in jax.devices()[:2]
    }  # fmt: skip
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.params))
    assert len(set(held.values())) == 1 and max(held.values()) < 0.6 * whole
    page = runner.pool[0]
    assert {shard.data.shape for shard in page.addressable_shards} == {(page.shape[0], 1, *page.shape[2:])}
    llm.close()


BOTH = {"tensor_parallel_size": 2, "data_parallel_size": 4}


@pytest.mark.parametrize(
    "settings, topology",
    [
        (BOTH, Topology(data=4, tensor=2)),
        (BOTH | {"enable_expert_parallel": True}, Topology(expert=4, tensor=2)),
        ({"data_parallel_size": 8, "expert_parallel_size": 4}, Topology(data=2, expert=4)),
        ({"tensor_parallel_size": 4, "expert_parallel_size": 4}, Topology(expert=1, tensor=4)),
    ],
)
def test_flags_mean_what_they_mean_elsewhere(settings, topology):
    assert topology_for(config(**settings), golden_config("qwen3_moe")) == topology


def test_a_division_of_experts_that_cannot_be_is_refused_with_those_that_can():
    with pytest.raises(
        ConfigError,
        match=r"8 experts of qwen3_moe cannot be divided 3 ways.* use expert_parallel_size of 1, 2, 4",
    ):
        topology_for(config(data_parallel_size=4, expert_parallel_size=3), golden_config("qwen3_moe"))
    with pytest.raises(ConfigError, match="llama has no experts"):
        topology_for(config(data_parallel_size=2, enable_expert_parallel=True), golden_config("llama"))


@pytest.mark.parametrize(
    "setting", [{"expert_capacity_factor": 2.0}, {"expert_dispatch_dtype": "fp8"}], ids=str
)
def test_settings_of_the_exchange_are_refused_where_nothing_is_exchanged(setting):
    model = golden_config("qwen3_moe")
    alone, inside = config(**setting), config(tensor_parallel_size=2, **setting)
    for settings in (alone, inside):
        with pytest.raises(ConfigError, match="has no effect: no experts of qwen3_moe are on other devices"):
            with_dispatch(settings, model, mesh_for(settings, model))


def test_rows_that_eight_bits_do_not_fit_are_refused_and_a_capacity_is_kept():
    model, apart = golden_config("qwen3_moe"), {"data_parallel_size": 4, "enable_expert_parallel": True}
    small = config(expert_dispatch_dtype="fp8", **apart)
    with pytest.raises(ConfigError, match="multiple of 128 values, and those of qwen3_moe have 64"):
        with_dispatch(small, model, mesh_for(small, model))
    capped = config(expert_capacity_factor=1.5, **apart)
    assert with_dispatch(capped, model, mesh_for(capped, model)).mixture.capacity == 1.5


def test_a_mesh_that_the_model_does_not_fit_is_refused_before_weights_are_read(model):
    with pytest.raises(ConfigError, match=r"tensor=8 does not divide its 4 heads.*Nearest that fit"):
        LLM(model, tensor_parallel_size=8)
