"""Pipeline stages: on any of them a step gives what one device gives, and each device has only its layers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.batch import Batch
from jaxserve.errors import ConfigError
from jaxserve.layers.over_stages import microbatch
from jaxserve.plan.cost import microbatch_rows
from jaxserve.runner import DeviceRunner
from jaxserve.step import COMPILER_OPTIONS
from jaxserve.topology import topology_for
from sharding.mesh import Topology
from sharding.stages import through_stages
from tests.jaxserve.models.running import golden_config
from tests.sharding.stepping import check_golden
from tests.tiny import tiny_checkpoint

MESHES = {
    "gpt_oss": Topology(stage=2, expert=2, tensor=2),  # windows in every other layer
    "qwen3_moe": Topology(stage=3, expert=2),
    "deepseek_v3": Topology(stage=2, expert=4),  # a dense layer before those that are divided
}


@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=pytest.mark.supports("meshes", f"pipeline stages, {a}")) for a in MESHES]
)
def test_log_probabilities_and_greedy_tokens(arch):
    """And rows go from stage to stage, while no weight does."""
    topology = MESHES[arch]
    for text in check_golden(arch, topology, stacked=True, steps=4).texts.values():
        lines = text.splitlines()
        (sent,) = [line for line in lines if " collective-permute(" in line]
        across = topology.devices // topology.stage
        assert "f32[" in sent and f"{{0,{across}}}" in sent, sent
        if topology.tensor == 1:
            gathered = [line for line in lines if " all-gather(" in line]
            assert gathered and all("= s32[" in line for line in gathered), "only counts are gathered"


PROMPTS = [[(7 * i + n) % 250 for n in range(length)] for i, length in enumerate([3, 70, 21, 1, 9] * 4)]
SIZES = {
    "max_model_len": 96, "max_num_seqs": 16, "max_num_batched_tokens": 40, "block_size": 4, "dtype": "float32",
    "num_gpu_blocks_override": 320, "compilation_cache_dir": "",
}  # fmt: skip


@pytest.mark.supports("meshes", "pipeline stages, llama")
def test_an_engine_of_stages_gives_the_tokens_of_one_device(tmp_path, monkeypatch):
    """Prompts in chunks that microbatches cut, 16 sequences at once in two microbatches, and cached beginnings."""
    monkeypatch.setitem(COMPILER_OPTIONS, "cpu", {"xla_backend_optimization_level": 0})
    model = str(tiny_checkpoint(tmp_path, layers=4, tokenizer=True))
    params = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=6, ignore_eos=True) for i in range(len(PROMPTS))
    ]
    answers, cached = [], []
    for settings in ({}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}):
        llm = LLM(model, **SIZES, **settings)
        again = [
            llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False) for _ in range(2)
        ]
        answers.append([[o.outputs[0].token_ids for o in outputs] for outputs in again])
        cached.append(sum(o.num_cached_tokens for o in again[1]))
        runner = llm.engine.runner
        assert isinstance(runner, DeviceRunner)
        if settings:
            shards = {
                leaf.sharding.shard_shape(leaf.shape)[0] for leaf in jax.tree.leaves(runner.params["layers"])
            }
            assert shards == {2} == {part.data.shape[0] for part in runner.pool.addressable_shards}
        llm.close()
    assert answers[0] == answers[1] and answers[0][0] == answers[0][1]
    assert cached[0] == cached[1] > 0


def test_rows_pass_the_stages_in_turn_and_nothing_happens_in_others():
    """Five microbatches in four stages, the last one short; each stage counts and keeps what it saw."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("stage",), axis_types=(AxisType.Auto,))
    x = jnp.arange(18, dtype=jnp.float32).reshape(9, 2)

    def stage(x, seen):
        def work(x, seen, number, real):
            me = jax.lax.axis_index("stage")
            seen = seen.at[0, number].add(jnp.where(real, jnp.sum(x), jnp.float32(0)))
            return x * 2 + me.astype(jnp.float32), seen, {"turns": real.astype(jnp.int32)[None]}

        out, seen, counts = through_stages(work, x, seen, rows=2)
        return out, seen, counts["turns"]

    with jax.set_mesh(mesh):
        run = jax.shard_map(
            stage, in_specs=(P(), P("stage")), out_specs=(P(), P("stage"), P("stage")), check_vma=False
        )
        out, seen, turns = jax.jit(run)(x, jnp.zeros((4, 5), jnp.float32))
    expected, sums = np.asarray(x), []
    for me in range(4):
        # What is beyond the last row arrives as zeros.
        rows = np.concatenate([expected, np.full((1, 2), 2**me - 1 - me, np.float32)])
        sums.append(rows.reshape(5, -1).sum(1))
        expected = expected * 2 + me
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(seen, sums)
    assert turns.tolist() == [5] * 4


@given(
    counts=st.lists(st.integers(0, 13), min_size=4, max_size=4),
    before=st.integers(0, 40),
    single=st.booleans(),
)
def test_microbatches_are_steps_with_the_rows_of_the_whole(counts, before, single):
    """Each row is in one of them, at its position; sequences end where the next one goes on."""
    counts = sorted((min(n, 1) for n in counts), reverse=True) if single else counts
    seqs, tokens, rows = len(counts), len(counts) if single else 52, 3 if single else 12
    starts = np.concatenate([[0], np.cumsum(counts)])
    owner = np.repeat(np.arange(seqs), counts)
    lens = np.array([before + n if n else 0 for n in counts])
    real = np.arange(len(owner))
    positions = np.zeros(tokens, int)
    positions[real] = lens[owner] - starts[owner + 1] + real
    batch = Batch(*(jnp.asarray(a, jnp.int32) for a in (
        np.arange(tokens), positions, 100 + np.arange(tokens), starts, lens, np.arange(seqs)[:, None],
    )))  # fmt: skip
    found = []
    for number in range(-(-tokens // rows)):
        part = jax.tree.map(np.asarray, _cut(batch, rows, jnp.int32(number), jnp.bool(True)))
        assert (len(part.kv_lens) == rows) == single, "a shape says whether each has one row at most"
        for b, (begin, end, length) in enumerate(
            zip(part.q_starts, part.q_starts[1:], part.kv_lens, strict=False)
        ):
            assert (length == 0) == (begin == end)
            for row in range(begin, end):
                assert (
                    part.positions[row] == length - end + row and part.places[row] == 100 + part.tokens[row]
                )
                assert owner[part.tokens[row]] == part.page_table[b, 0]
                found.append(part.tokens[row])
        assert (part.places[part.q_starts[-1] :] < 4).all(), "padding is written to page 0"
    assert found == real.tolist()
    nothing = jax.tree.map(np.asarray, _cut(batch, rows, jnp.int32(0), jnp.bool(False)))
    assert not nothing.q_starts.any() and not nothing.kv_lens.any() and (nothing.places < 4).all()


_cut = jax.jit(partial(microbatch, page_size=4), static_argnums=1)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"pipeline_parallel_size": 2, "prefill_context_parallel_size": 2}, "prefill_context_parallel_size do not"),
        ({"pipeline_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True},
         "enable_eplb do not go together"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_stages_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        topology_for(EngineConfig("model", **settings), golden_config("qwen3_moe"))


def test_an_engine_whose_layers_cannot_be_divided_equally_is_refused(tmp_path):
    model = str(tiny_checkpoint(tmp_path, layers=3, tokenizer=True))
    with pytest.raises(ConfigError, match=r"stage=2 does not divide its 3 layers that are alike; 3 does"):
        LLM(model, pipeline_parallel_size=2)


def test_layers_that_are_alike_are_the_last_ones():
    assert [golden_config(a).alike for a in ("llama", "deepseek_v3", "gpt_oss")] == [3, 2, 4]


def test_a_microbatch_is_as_large_as_keeps_a_stage_computing():
    assert microbatch_rows(8, 8) == microbatch_rows(8, 2) == 8, "one microbatch"
    assert microbatch_rows(16, 16) == 8 and microbatch_rows(64, 1) == 8
    assert microbatch_rows(64, 8) == 16, "more rows than sequences"
    assert microbatch_rows(64, 1, 0.25) == 32, "experts see a quarter of the rows"
