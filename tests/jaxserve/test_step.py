"""The public step: a loop of one's own gives the engine's tokens, with layers apart or stacked, on CPU or for a TPU."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from prometheus_client import CollectorRegistry

import jaxserve.build
from jaxserve import SamplingParams, Step
from jaxserve.batch import Row, flat_size, pack
from jaxserve.buckets import Bucket
from jaxserve.config import EngineConfig
from jaxserve.metrics import Metrics
from jaxserve.models import ModelConfig, model_for
from jaxserve.runner import DeviceRunner
from jaxserve.sampling.state import new_state
from sharding.params import Param, stack_layers
from tests.engines import SIZES, around, complete, greedy
from tests.jaxserve.models.running import stacked
from tests.pallas_kernels.conftest import tpu_compiler  # noqa: F401
from tests.tiny import tiny_checkpoint

PROMPTS = [[(i * 31 + n) % 250 for i in range(n)] for n in (3, 17, 8)]
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True)


def own_loop(step: Step, params, pool, prompts: list[list[int]], sampling: SamplingParams, new: int):
    """Each step: for every sequence up to 8 of the tokens that it has and that are not computed."""
    pages_each = -(-(max(map(len, prompts)) + new) // step.page_size)
    pages = [[1 + b * pages_each + i for i in range(pages_each)] for b in range(len(prompts))]
    bucket = Bucket(tokens=8 * len(prompts), seqs=len(prompts), pages=pages_each)
    state = new_state(len(prompts), step.config.vocab_size)
    tokens, computed = [list(prompt) for prompt in prompts], [0] * len(prompts)
    while any(len(known) < len(prompt) + new for known, prompt in zip(tokens, prompts, strict=True)):
        rows = []
        for b, known in enumerate(tokens):
            end = min(len(known), computed[b] + 8)
            rows.append(
                Row(
                    known[computed[b] : end], end, pages[b], slot=b, samples=end == len(known), params=sampling,
                    seed=sampling.seed or 0, n_out=len(known) - len(prompts[b]),
                )
            )  # fmt: skip
        output, pool, state = step(params, pool, state, pack(rows, bucket), bucket)
        sampled = np.asarray(output.read[0]).tolist()
        for b, row in enumerate(rows):
            computed[b] = row.kv_len
            tokens[b] += [sampled[b]] * row.samples
    return [known[len(prompt) : len(prompt) + new] for known, prompt in zip(tokens, prompts, strict=True)]


def blank_pool(config: ModelConfig, page_size: int, pages: int):
    shape = (pages, *model_for(config).cache_shape(config, page_size))
    return tuple(jnp.zeros(shape, jnp.float32) for _ in range(config.num_layers))


@pytest.mark.parametrize("form", ["tuple", "stack"])
def test_a_loop_of_ones_own_gives_the_engines_tokens(tiny, form):
    engine = around(tiny)
    params, page_size = tiny.engine.runner.params, 4
    step = Step(tiny.model_config, page_size)
    for sampling in (greedy(max_tokens=12), SEEDED):
        expected = [complete(engine, prompt, sampling).outputs[0].token_ids for prompt in PROMPTS]
        pool = blank_pool(tiny.model_config, page_size, 64)
        if form == "stack":
            got = own_loop(step, stacked(params), jnp.stack(pool), PROMPTS, sampling, 12)
        else:
            got = own_loop(step, params, pool, PROMPTS, sampling, 12)
        assert got == expected


def test_the_engine_runs_on_stacked_layers(tiny, tmp_path, monkeypatch, compilation_cache_dir):
    """As on an accelerator; the loader fills the stacks in place."""
    monkeypatch.setattr(jaxserve.build, "platform", lambda: "tpu")
    sizes = SIZES | {"max_num_seqs": 1, "max_num_batched_tokens": 8}
    config = EngineConfig(
        str(tiny_checkpoint(tmp_path, tokenizer=True)), compilation_cache_dir=compilation_cache_dir, **sizes
    )
    built = jaxserve.build.build(config, Metrics(CollectorRegistry(), "tiny"))
    runner = built.engine.runner
    assert isinstance(runner, DeviceRunner)
    assert runner.params["layers"][0]["q"].shape == (2, 32, 32) and runner.pool.shape[0] == 2
    jax.tree.map(
        np.testing.assert_array_equal, runner.params["layers"], stacked(tiny.engine.runner.params)["layers"]
    )
    for sampling in (greedy(max_tokens=12), SEEDED):
        for prompt in PROMPTS:
            expected = complete(around(tiny), prompt, sampling).outputs[0]
            assert complete(built.engine, prompt, sampling).outputs[0] == expected
    runner.close()


def test_only_neighbouring_layers_of_equal_structure_are_stacked():
    def layer(i: int, **fields):
        return {"q": replace(Param((4, 2), ("heads", None), f"{i}.q"), **fields)}

    (pair,) = stack_layers([layer(0), layer(1)])
    assert pair["q"] == Param((2, 4, 2), ("layers", "heads", None), ("0.q", "1.q"))
    norm = {"norm": Param((4,), (None,), "1.norm")}
    parts = stack_layers([layer(0), layer(1) | norm, layer(2) | norm, layer(3), layer(4, shape=(4, 3))])
    assert [part["q"].shape for part in parts] == [(1, 4, 2), (2, 4, 2), (1, 4, 2), (1, 4, 3)]
    assert [part["q"].axes[0] for part in parts] == [None] * 3 + ["layers"], "stages divide the last ones"


def test_experts_of_layers_are_one_stack():
    layers = [
        {"up": Param((3, 4, 2), ("experts", "ffn", None), tuple(f"{i}.{e}" for e in range(3)))}
        for i in (0, 1)
    ]
    (stack,) = stack_layers(layers)
    assert stack["up"].shape == (2, 3, 4, 2) and stack["up"].source[:4] == ("0.0", "0.1", "0.2", "1.0")
    assert stack["up"].part_shape == (4, 2)


LLAMA = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def lowered(bucket: Bucket, device: jax.Device):
    """The whole step of LLAMA lowered for a TPU, and the bytes of what it updates in place."""
    mesh = Mesh(np.array([device]), ("x",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec())

    def array(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    config = ModelConfig.from_hf(LLAMA)
    model = model_for(config)
    tree = model.params(config)
    tree = tree | {"layers": stack_layers(tree["layers"])}
    params = jax.tree.map(lambda p: array(p.shape), tree, is_leaf=lambda x: isinstance(x, Param))
    pool = array((config.num_layers, 1025, *model.cache_shape(config, 128)))
    slots = jax.eval_shape(lambda: new_state(32, config.vocab_size))
    state = jax.tree.map(lambda x: array(x.shape, x.dtype), slots)
    flat = array((flat_size(bucket),), jnp.int32)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = Step(config, 128).jitted.trace(params, pool, state, flat, bucket=bucket)
        donated = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((pool, state)))
        return traced.lower(lowering_platforms=("tpu",)), donated


@pytest.fixture(scope="module")
def tpu(tpu_compiler):  # noqa: F811
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]


def test_the_step_compiles_for_a_tpu_that_is_not_here(tpu):
    """The whole of it, kernels and sampler included; pages and slots are updated in place."""
    step, donated = lowered(Bucket(32, 32, 64), tpu)
    compiled = step.compile()
    assert compiled.as_text().count("tpu_custom_call") >= 2, "attention and page writes run as kernels"
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= donated
    assert memory.temp_size_in_bytes < donated / 4, "the pages are copied"


@pytest.mark.parametrize("bucket", [Bucket(512, 32, 64), Bucket(512, 1, 64)], ids=["beside others", "alone"])
def test_steps_with_prompts_lower_for_it(tpu, bucket):
    """Compiled for real they take a minute."""
    assert lowered(bucket, tpu)[0].as_text().count("tpu_custom_call") >= 2
