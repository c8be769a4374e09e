"""A plan: whether a model fits a slice of TPUs, what it takes there, and how fast it can be at best."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from jaxserve.buckets import Bucket, every_bucket
from jaxserve.build import settled
from jaxserve.cache_kernels import check_cache_kernels
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.memory import ACCELERATOR_UTILIZATION, Memory, fitting_length, plan_pages
from jaxserve.models import ModelConfig, model_for
from jaxserve.plan.compiled import CompiledStep, Deployment, compile_step, deployment
from jaxserve.plan.model import read_config
from jaxserve.plan.roofline import Load, Roofline, roofline, weights_of
from jaxserve.plan.slices import slice_of
from jaxserve.topology import model_sizes, topology_for, with_dispatch
from jaxserve.weights.schemes import settings_of, without_settings
from pallas_kernels.chip import Chip
from pallas_kernels.formats import FP8_BLOCK, MXFP4
from sharding.mesh import STAGE, Misfit, ModelSizes, Topology, size

DIVIDING = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size",
    "enable_expert_parallel",
)  # fmt: skip
EXPERTS = {"fp8": FP8_BLOCK, "mxfp4": MXFP4}  # by quant_method: how a checkpoint keeps its experts
EXPERTS_ALONE = ("mxfp4",)  # methods that leave other linear layers as they are


@dataclass(frozen=True)
class PlannedStep:
    """A kind of step: what the compiler says, and the least time it can take."""

    name: str
    compiled: CompiledStep
    least: Roofline


@dataclass(frozen=True)
class Plan:
    """Bytes are of one device."""

    model: str
    slice: str
    chip: Chip
    devices: int
    topology: Topology
    experts: str  # format of the experts' weights
    weight_bytes: int
    state_bytes: int
    page_bytes: int
    num_pages: int  # of each group of devices
    groups: int
    block_size: int
    max_model_len: int
    context: int
    steps: list[PlannedStep]

    @property
    def cache_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def cache_tokens(self) -> int:
        """Of the whole deployment."""
        return (self.num_pages - 1) * self.block_size * self.groups

    @property
    def sequences(self) -> int:
        """Of `context` tokens that the cache holds at once."""
        return self.cache_tokens // self.context

    @property
    def headroom_bytes(self) -> int:
        """What the largest step leaves of the device's memory."""
        return int(self.chip.hbm_bytes) - max(step.compiled.device_bytes for step in self.steps)


def plan(
    config: EngineConfig,
    slice_name: str,
    context: int,
    *,
    on_step: Callable[[str], None] = lambda name: None,
    save: Path | None = None,
) -> Plan:
    """Compile the decode and the prefill step of `config.model` for a slice, and count.

    `on_step` hears what is being compiled. `save` is a folder for all steps of the deployment. ConfigError,
    with the numbers, if the model does not fit the mesh or the mesh's memory.
    """
    chip, _ = slice_of(slice_name)
    made = deployed(config, slice_name)
    config, model, experts = made.config, made.model, made.experts
    weights = weights_of(made.params, made.weights, made.where.params)
    weight_bytes = sum(weight.nbytes for weight in weights)
    num_pages = _pages(made, chip, weight_bytes, slice_name)
    longest = fitting_length(config, model.max_model_len, num_pages)
    groups = made.where.groups
    steps = []
    for name, bucket in _buckets(config, longest).items():
        on_step(name)
        compiled = compile_step(made, bucket, num_pages)
        load = _load(made, bucket, min(context, longest))
        token_bytes = made.arrays.page_bytes / config.block_size
        steps.append(
            PlannedStep(name, compiled, roofline(model, chip, weights, token_bytes, load, compiled.sent))
        )
    if save:
        every = every_bucket(config, longest, made.where.context)
        for number, bucket in enumerate(every, 1):
            on_step(f"{number}. of {len(every)} to save")
            known = next((step.compiled for step in steps if step.compiled.bucket == bucket), None)
            (known or compile_step(made, bucket, num_pages)).save(save)
    return Plan(
        model=config.model, slice=slice_name, chip=chip, devices=made.mesh.size, topology=topology_for(config, model),
        experts=experts.name if experts else config.dtype, weight_bytes=weight_bytes,
        state_bytes=made.arrays.state_bytes, page_bytes=made.arrays.page_bytes, num_pages=num_pages, groups=groups,
        block_size=config.block_size, max_model_len=longest, context=min(context, longest), steps=steps,
    )  # fmt: skip


def _load(made: Deployment, bucket: Bucket, context: int) -> Load:
    with jax.sharding.use_abstract_mesh(made.mesh.abstract_mesh):
        rows = model_for(made.model).rows_at_once(made.model, bucket.tokens, bucket.seqs)
    stages = size(made.mesh, (STAGE,))
    parts = -(-bucket.tokens // rows) if stages > 1 else 1
    return Load(bucket.tokens, bucket.seqs, context, made.where.groups, stages, parts)


def deployed(config: EngineConfig, slice_name: str) -> Deployment:
    """The model of `config` laid out on a slice; ConfigError if it cannot be divided so."""
    hf = read_config(config.model)
    method = (settings_of(hf) or {}).get("quant_method", "")
    model = ModelConfig.from_hf(without_settings(hf), config.max_model_len)
    try:
        mesh = _with_axes(topology_for(config, model).mesh(model_sizes(model), slice_of(slice_name)[1]))
    except Misfit as why:
        raise ConfigError(str(why)) from why
    model = with_dispatch(config, model, mesh)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        config = settled(config, model)
        check_cache_kernels(config, model, mesh)
    experts = EXPERTS.get(method) if model.mixture else None
    return deployment(config, model, mesh, experts, linears=method not in EXPERTS_ALONE)


def _with_axes(mesh: Mesh) -> Mesh:
    """Operations ask the ambient mesh what platform it is, and one without axes does not say."""
    return mesh if mesh.axis_names else Mesh(mesh.devices.reshape(1), ("data",), axis_types=(AxisType.Auto,))


def divided_for(config: EngineConfig, slice_name: str) -> EngineConfig:
    """`config` with the model divided over the whole slice in the usual way, unless it says how.

    Mixtures: sequences apart on every device and experts divided over all. Others: as many devices as share heads.
    """
    if any(getattr(config, f.name) != f.default for f in fields(config) if f.name in DIVIDING):
        return config
    count = len(slice_of(slice_name)[1])
    sizes = model_sizes(ModelConfig.from_hf(without_settings(read_config(config.model))))
    if sizes.experts:
        return replace(config, data_parallel_size=count, enable_expert_parallel=sizes.experts % count == 0)
    tensor = max(n for n in range(1, count + 1) if count % n == 0 and fits(Topology(tensor=n), sizes))
    return replace(config, tensor_parallel_size=tensor, data_parallel_size=count // tensor)


def fits(topology: Topology, sizes: ModelSizes) -> bool:
    """Whether the model can be divided so."""
    try:
        topology.check(sizes)
    except Misfit:
        return False
    return True


def _buckets(config: EngineConfig, longest: int) -> dict[str, Bucket]:
    pages = -(-longest // config.block_size)
    return {
        "decode": Bucket(config.max_num_seqs, config.max_num_seqs, pages),
        "prefill": Bucket(
            max(config.max_num_batched_tokens, config.max_num_seqs + 1), config.max_num_seqs, pages
        ),
    }


def _pages(made: Deployment, chip: Chip, weight_bytes: int, slice_name: str) -> int:
    """The pages that the engine would make; ConfigError with the numbers if the weights alone are too large."""
    config = made.config
    share = config.gpu_memory_utilization or ACCELERATOR_UTILIZATION
    room = chip.hbm_bytes * share
    if weight_bytes >= room:
        raise ConfigError(
            f"{config.model} does not fit {slice_name}: its weights take {weight_bytes / 1e9:.1f} GB of each device, "
            f"and {share:.0%} of its memory is {room / 1e9:.1f} GB; use about {weight_bytes / room:.1f} times as many "
            "devices, or divide more of it (--tensor-parallel-size, --enable-expert-parallel)"
        )
    memory = Memory(int(chip.hbm_bytes), int(chip.hbm_bytes))
    config = replace(config, gpu_memory_utilization=share)
    return plan_pages(
        config,
        made.arrays.page_bytes,
        weight_bytes + made.arrays.state_bytes,
        made.model.max_model_len,
        memory,
    )


def as_json(p: Plan) -> dict[str, Any]:
    """The plan in plain values."""
    return {
        "model": p.model, "slice": p.slice, "chip": p.chip.name, "devices": p.devices, "topology": str(p.topology),
        "expert_weights": p.experts, "max_model_len": p.max_model_len, "context": p.context,
        "device_bytes": {
            "weights": p.weight_bytes, "cache": p.cache_bytes, "state": p.state_bytes, "headroom": p.headroom_bytes,
            "hbm": int(p.chip.hbm_bytes),
        },
        "cache_tokens": p.cache_tokens, "sequences": p.sequences,
        "steps": [
            {
                "name": s.name, "tokens": s.compiled.bucket.tokens * p.groups, "compile_seconds": s.compiled.seconds,
                "workspace_bytes": s.compiled.workspace_bytes, "program_bytes": s.compiled.program_bytes,
                "collectives": [
                    {"kind": t.kind, "calls": t.calls, "bytes": t.nbytes} for t in s.compiled.sent
                ],
                "least_seconds": s.least.seconds, "limit": s.least.limit, "memory_seconds": s.least.memory,
                "compute_seconds": s.least.compute, "network_seconds": s.least.network,
            }
            for s in p.steps
        ],
    }  # fmt: skip
