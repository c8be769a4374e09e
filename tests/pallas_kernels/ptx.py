"""From a function with Pallas-Triton kernels to machine code for GPUs that are not here, and what ptxas says of it."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.experimental.pallas.triton import CUSTOM_CALL_TARGET_NAME
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jaxlib.mlir import ir

from pallas_kernels.chip import Gpu


@dataclass(frozen=True)
class Kernel:
    """One kernel as Pallas hands it to XLA."""

    name: str
    code: bytes  # Triton IR, as MLIR bytecode
    warps: int
    stages: int


@dataclass(frozen=True)
class Program:
    """One kernel compiled."""

    ptx: str
    shared: int  # bytes
    registers: int  # of a thread
    spilled: int  # bytes stored

    @property
    def tensor_cores(self) -> bool:
        """Whether a product is done by the tensor cores of any generation."""
        return re.search(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", self.ptx) is not None


def mesh_of(gpu: Gpu) -> AbstractMesh:
    """A mesh of one such GPU, which need not be here."""
    device = AbstractDevice(device_kind=gpu.device_kind, num_cores=None, platform="cuda")
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)


def lowered(function, gpu: Gpu, args, kwargs=None, donate=()):
    """`function` lowered for this GPU under its abstract mesh."""
    with jax.sharding.use_abstract_mesh(mesh_of(gpu)):
        traced = jax.jit(function, donate_argnums=donate).trace(*args, **(kwargs or {}))
        return traced.lower(lowering_platforms=("cuda",))


def kernels_in(low) -> list[Kernel]:
    """All Triton kernels that a lowered function calls."""
    return [
        Kernel(
            config["name"].value,
            config["ir"].value_bytes,
            config["num_warps"].value,
            config["num_stages"].value,
        )
        for op in _operations(low.compiler_ir().operation)
        if op.name == "stablehlo.custom_call"
        and op.attributes["call_target_name"].value == CUSTOM_CALL_TARGET_NAME
        for config in [_typed(op.attributes["mhlo.backend_config"])]
    ]


def compiled(kernel: Kernel, gpu: Gpu) -> Program:
    """PTX by the triton package, and what its ptxas says of it; ptxas' own error where it refuses."""
    from triton._C.libtriton import ir as triton_ir  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget, Language  # pyright: ignore[reportMissingImports]
    from triton.backends.nvidia.compiler import CUDABackend, get_ptxas  # pyright: ignore[reportMissingImports]

    backend = CUDABackend(GPUTarget("cuda", gpu.capability, 32))
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages, "enable_fp_fusion": True}
    options, stages, facts = backend.parse_options(options), {}, {}
    backend.add_stages(stages, options, Language.TRITON)
    context = triton_ir.context()
    triton_ir.load_dialects(context)
    backend.load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.mlir")
        source.write_bytes(kernel.code)
        code = triton_ir.parse_mlir_module(str(source), context)
        code.context = context
        for stage in ("ttir", "ttgir", "llir", "ptx"):
            code = stages[stage](code, facts)
        assembly = Path(folder, "kernel.ptx")
        assembly.write_text(code)
        ptxas, target = get_ptxas(gpu.capability).path, f"--gpu-name=sm_{gpu.capability}a"
        said = subprocess.run(
            [ptxas, "-v", target, str(assembly), "-o", "/dev/null"], capture_output=True, text=True
        )
    assert said.returncode == 0, said.stderr
    registers, spilled = (
        int(re.search(words, said.stderr)[1])
        for words in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    return Program(code, facts["shared"], registers, spilled)


def _typed(config):
    """The entries of a dictionary attribute with their own types."""
    kinds = {
        "name": ir.StringAttr,
        "ir": ir.StringAttr,
        "num_warps": ir.IntegerAttr,
        "num_stages": ir.IntegerAttr,
    }
    config = ir.DictAttr(config)
    return {name: kind(config[name]) for name, kind in kinds.items()}


def _operations(operation):
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op.operation
                yield from _operations(op.operation)
