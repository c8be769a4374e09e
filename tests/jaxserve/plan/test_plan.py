"""Plans: real steps compiled for chips that are not here, what they take of them, and what is refused with numbers."""

import json
import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxserve.buckets import Bucket
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models import ModelConfig
from jaxserve.plan.compiled import compile_step
from jaxserve.plan.cost import hot_experts
from jaxserve.plan.model import known_models, read_config
from jaxserve.plan.planner import as_json, deployed, divided_for, plan
from jaxserve.plan.roofline import Load, attention_flops, roofline, weights_of
from jaxserve.plan.slices import slice_of
from jaxserve.weights.schemes import without_settings
from pallas_kernels.formats import QTensor
from tests.pallas_kernels.conftest import tpu_compiler  # noqa: F401

pytestmark = pytest.mark.usefixtures("tpu_compiler")


def settings(model: str, **more) -> EngineConfig:
    return EngineConfig(model=model, block_size=128, max_model_len=2048, max_num_seqs=32, **more)


@pytest.fixture
def small(tmp_path) -> str:
    """A model of two layers with the heads of a real one."""
    config = read_config("llama-3.1-8b") | {
        "num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 4096,
        "num_attention_heads": 8, "num_key_value_heads": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_a_plan_adds_up(small):
    found = plan(divided_for(settings(small), "v5e:2x2"), "v5e:2x2", 1024)
    decode, prefill = found.steps
    for step in (decode.compiled, prefill.compiled):
        assert step.argument_bytes >= found.weight_bytes + found.cache_bytes
        assert step.workspace_bytes < found.cache_bytes / 4, "the cache is copied"
    assert found.headroom_bytes > 0.05 * found.chip.hbm_bytes
    assert found.sequences == found.cache_tokens // 1024 > 0
    sent = {traffic.kind: traffic for traffic in decode.compiled.sent}
    assert sent["all-reduce"].calls >= 2 * 2, "two sums a layer"
    assert sent["all-gather"].nbytes >= 32 * 4096 * 4, "the logits"
    assert 0 < decode.least.compute < prefill.least.compute
    assert json.loads(json.dumps(as_json(found)))["devices"] == 4


@pytest.mark.supports("meshes", "pipeline stages, compiled for TPUs")
def test_stages_take_half_of_the_layers_and_hand_rows_on(small):
    """Microbatches of a prefill pass two stages in one turn more than there are; nothing is copied for it."""
    config = settings(
        small, tensor_parallel_size=2, num_gpu_blocks_override=1024, max_num_batched_tokens=1024
    )
    found = plan(replace(config, pipeline_parallel_size=2), "v5e:2x2", 1024)
    parts, whole = (deployed(replace(config, pipeline_parallel_size=stages), "v5e:2x2") for stages in (2, 1))
    # Bytes of embedding and head, which two devices share, and of the last norm.
    everywhere = 2 * 4096 * 1024 // 2 * 2 + 1024 * 2
    assert 2 * (found.weight_bytes - everywhere) == whole.arrays.weight_bytes - everywhere
    assert 2 * found.page_bytes == whole.arrays.page_bytes
    for step, turns, rows in zip(found.steps, (2, 5), (32, 256), strict=True):
        (sent,) = [t for t in step.compiled.sent if t.kind == "collective-permute"]
        assert (sent.calls, sent.nbytes) == (turns, turns * rows * 1024 * 2), "one microbatch, and four"
        assert step.compiled.workspace_bytes < found.cache_bytes / 4, "the cache is copied"
    load = Load(1024, 32, 1024, 1)
    staged, alone = (
        roofline(d.model, found.chip, weights_of(d.params, d.weights, d.where.params), 0, load, [])
        for d, load in ((parts, replace(load, stages=2, microbatches=4)), (whole, load))
    )
    head = 2 * 32 * 4096 * 1024 // 2 / found.chip.bf16
    assert staged.compute - head == pytest.approx((alone.compute - head) / 2 * 5 / 4)


def test_a_plan_saves_every_step_of_its_deployment(small, tmp_path):
    config = replace(settings(small, tensor_parallel_size=4), max_num_seqs=1, max_num_batched_tokens=8)
    plan(config, "v5e:2x2", 1024, save=tmp_path / "compiled")
    saved = [*(tmp_path / "compiled").iterdir()]
    assert len(saved) == 2 and all(file.stat().st_size > 1000 for file in saved), (
        "one token, and a prompt's eight"
    )


STEPS = [
    ("llama-3.1-8b", "v5e:2x2", "v5e"),
    ("llama-3.1-8b", "tpu7x:2x2x1", "TPU7x"),
    ("smollm2-135m", "v5e:1x1", "v5e"),
    ("smollm2-135m", "tpu7x:1x1x1", "TPU7x"),
]


@pytest.mark.parametrize(
    ("model", "slice_name"),
    [pytest.param(m, s, marks=pytest.mark.supports("whole step compiled", f"{m}, {c}")) for m, s, c in STEPS],
)
def test_whole_steps_run_on_kernels_and_copy_neither_cache_nor_weights(model, slice_name):
    made = deployed(divided_for(settings(model), slice_name), slice_name)
    step = compile_step(made, Bucket(32, 32, 16), num_pages=513)
    program = step.executable.as_text() or ""
    assert program.count("tpu_custom_call") >= 2
    stacks = {
        leaf.sharding.shard_shape(leaf.shape)
        for part in made.weights["layers"]
        for leaf in jax.tree.leaves(part)
    }
    assert any(len(stack) == 3 for stack in stacks)
    for stack in stacks:
        assert not re.search(rf"= bf16\[{','.join(map(str, stack))}\]\S* copy\(", program), (
            f"{stack} is copied"
        )
    assert step.workspace_bytes < 513 * made.arrays.page_bytes / 4, "the cache is copied"


def test_a_mixture_with_latents_runs_on_sequences_heads_and_experts_divided(tmp_path):
    """Every group of 4 devices shares heads; XLA:TPU's partitioner once crashed on this vocabulary by 4."""
    config = read_config("deepseek-v3") | {"num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    divided = settings(
        str(tmp_path), data_parallel_size=2, tensor_parallel_size=4, enable_expert_parallel=True
    )
    step = compile_step(deployed(divided, "v5p:2x2x2"), Bucket(32, 32, 16), num_pages=65)
    assert {"all-reduce", "expert_exchange"} <= {traffic.kind for traffic in step.sent}


def test_every_known_model_is_one_that_runs():
    for name in known_models():
        assert ModelConfig.from_hf(without_settings(read_config(name))).num_layers > 20


@pytest.mark.parametrize(
    ("model", "slice_name", "why"),
    [
        (
            "deepseek-v3",
            "v5e:2x2",
            r"its weights take 183\.6 GB of each device, and 90% of its memory is 14\.4 GB",
        ),
        ("llama-3.1-8b", "v9:2x2", "topology 'v9:2x2' is not"),
        ("llama-3.1-8b", "v5e:3x3", "the compiler knows no slice v5e:3x3"),
        ("no-such-model", "v5e:2x2", "no local folder"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(model, slice_name, why, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(Exception, match=why):
        plan(divided_for(settings(model), slice_name), slice_name, 1024)


def test_what_a_checkpoint_has_in_8_bits_is_planned_in_8_bits():
    """DeepSeek-V3: all but the embedding, the head, routers, norms, and what absorbs latents; 671 GB and a little."""
    made = deployed(divided_for(settings("deepseek-v3"), "v5p:4x4x4"), "v5p:4x4x4")
    plain = jax.tree.leaves(made.weights, is_leaf=lambda x: isinstance(x, QTensor))
    plain = [x for x in plain if not isinstance(x, QTensor) and x.dtype == jnp.bfloat16]
    absorbing = 61 * 128 * 256 * 512
    assert sum(x.size for x in plain if x.ndim == 4) == absorbing
    assert sum(x.size for x in plain if x.ndim == 3) == 58 * 256 * 7168, "routers"
    values = sum(math.prod(w.param.shape) for w in weights_of(made.params, made.weights, made.where.params))
    stored = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made.weights))
    assert stored == pytest.approx(values + sum(x.size for x in plain), rel=1e-3), (
        "a scale for 16,384 of them"
    )


def test_more_devices_than_the_slice_has_are_refused():
    with pytest.raises(ConfigError, match=r"tensor=8 needs 8 devices, and there are 4"):
        plan(settings("llama-3.1-8b", tensor_parallel_size=8), "v5e:2x2", 1024)


def test_the_roofline_is_the_arithmetic():
    """Llama-3.1-8B on one chip: every weight but the embedding is read and multiplied once a token."""
    chip, _ = slice_of("v6e:1x1")
    made = deployed(settings("llama-3.1-8b"), "v6e:1x1")
    weights = weights_of(made.params, made.weights, made.where.params)
    load = Load(tokens=16, seqs=16, context=1000, groups=1)
    token = 32 * 8 * 256 * 2
    least = roofline(made.model, chip, weights, token, load, [])
    linears = 32 * (4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 14336) + 128256 * 4096
    total = linears + 128256 * 4096 + (2 * 32 + 1) * 4096
    assert least.memory == pytest.approx((2 * total + 16 * 1000 * token) / chip.hbm_bandwidth)
    attention = 16 * attention_flops(made.model, 1000)
    assert attention == 16 * 4 * 32 * 128 * 1000 * 32
    assert least.compute == pytest.approx((2 * 16 * linears + attention) / chip.bf16)


def test_experts_are_read_as_far_as_tokens_hit_them():
    made = deployed(
        settings("qwen3-235b-a22b", data_parallel_size=16, enable_expert_parallel=True), "v5p:2x2x4"
    )
    chip, _ = slice_of("v5p:2x2x4")
    weights = weights_of(made.params, made.weights, made.where.params)
    few, many = (
        roofline(made.model, chip, weights, 0, Load(tokens, tokens, 1, 16), []).memory for tokens in (1, 256)
    )
    experts = sum(w.nbytes for w in weights if "experts" in w.param.axes)
    difference = (hot_experts(4096, 128, 8) - hot_experts(16, 128, 8)) / 128 * experts
    assert (many - few) * chip.hbm_bandwidth == pytest.approx(difference)
