"""What each TPU generation and GPU can do, per JAX device, with the source of every figure."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Chip:
    """Published figures of one JAX device: a chip, but half a chip (one TensorCore) on TPU7x."""

    name: str
    device_kinds: tuple[str, ...]  # how JAX calls it
    topology: str  # the smallest one the compiler knows by name, to compile for it without having it
    cores: int  # TensorCores that share this device; a "parallel" grid dimension is split over them
    bf16: float  # floating-point operations a second
    int8: float  # operations a second, 0 where the matrix unit has no such mode
    fp8: float  # floating-point operations a second, 0 where the matrix unit has no such mode
    hbm_bandwidth: float  # bytes a second
    hbm_bytes: float
    vmem_bytes: int  # per TensorCore
    smem_bytes: int  # per TensorCore
    ici_bandwidth: float  # bytes a second that it receives from other chips over all links, and sends as many
    source: str

    def floor(self, flops: float, nbytes: float) -> float:
        """The seconds that no implementation with BF16 products can beat."""
        return max(flops / self.bf16, nbytes / self.hbm_bandwidth)


_DOCS = "docs.cloud.google.com/tpu/docs/"
_MIB = 1 << 20
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "v5e", ("TPU v5 lite", "TPU v5e"), "v5e:2x2", 1, 197e12, 394e12, 0.0, 819e9, 16e9, 128 * _MIB, _MIB,
            200e9,
            f"{_DOCS}v5e: 197 TFLOP/s, 393 TOP/s int8, 819 GB/s, 16 GB, ICI 400 both ways; VMEM: jax._src.tpu_info",
        ),
        Chip(
            "v5p", ("TPU v5", "TPU v5p"), "v5p:2x2x1", 2, 459e12, 918e12, 0.0, 2765e9, 95 * 2.0**30, 64 * _MIB, _MIB,
            600e9,
            f"{_DOCS}v5p: 459 TFLOP/s, 2765 GB/s, 95 GiB, ICI 1200 both ways; "
            "int8: jax-ml.github.io/scaling-book; VMEM: jax._src.tpu_info",
        ),
        Chip(
            "v6e", ("TPU v6 lite", "TPU v6e"), "v6e:2x2", 1, 918e12, 1836e12, 918e12, 1638e9, 32e9, 128 * _MIB, _MIB,
            400e9,
            f"{_DOCS}v6e: 918 TFLOP/s, 1836 TOP/s int8, 32 GB, 1638 GB/s, ICI 800 both ways; VMEM: jax._src.tpu_info",
        ),
        Chip(
            "tpu7x", ("TPU7x",), "tpu7x:2x2x1", 1, 1153.5e12, 0.0, 2307e12, 3685e9, 96e9, 64 * _MIB, _MIB,
            300e9,
            f"{_DOCS}tpu7x, halved for one of its two devices: 2307 TFLOP/s, 4614 fp8, 192 GB, 7.37 TB/s, ICI 1200",
        ),
    )
}  # fmt: skip


def ambient() -> Chip:
    """The chip of the ambient mesh or of the default device; v5e where neither is a TPU (the interpreter)."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = device.device_kind if device else jax.devices()[0].device_kind
    return next((chip for chip in CHIPS.values() if kind in chip.device_kinds), CHIPS["v5e"])


@dataclass(frozen=True)
class Gpu:
    """Published figures of one GPU (SXM boards), products without sparsity."""

    name: str
    device_kind: str  # how JAX's name for it begins
    processors: int  # streaming multiprocessors
    bf16: float  # floating-point operations a second
    fp8: float
    hbm_bandwidth: float  # bytes a second
    hbm_bytes: float
    shared_bytes: int  # that one program may have
    capability: int  # sm_90 is 90
    source: str

    def floor(self, flops: float, nbytes: float) -> float:
        """The seconds that no implementation with BF16 products can beat."""
        return max(flops / self.bf16, nbytes / self.hbm_bandwidth)


_CUDA = "shared memory: CUDA C++ Programming Guide, compute capabilities"
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            "h100", "NVIDIA H100", 132, 989.4e12, 1978.9e12, 3350e9, 80e9, 227 << 10, 90,
            f"NVIDIA H100 datasheet and architecture white paper, SXM5; {_CUDA}",
        ),
        Gpu(
            "h200", "NVIDIA H200", 132, 989.4e12, 1978.9e12, 4800e9, 141e9, 227 << 10, 90,
            f"NVIDIA H200 datasheet, SXM; processors as H100; {_CUDA}",
        ),
        Gpu(
            "b200", "NVIDIA B200", 148, 2250e12, 4500e12, 8000e9, 180e9, 227 << 10, 100,
            f"NVIDIA HGX B200 datasheet, an eighth of it, halved for dense products; {_CUDA}",
        ),
    )
}  # fmt: skip


def ambient_gpu() -> Gpu:
    """The GPU of the ambient mesh or of the default device; H100 where it is another one, or none."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = device.device_kind if device else jax.devices()[0].device_kind
    return next((gpu for gpu in GPUS.values() if kind.startswith(gpu.device_kind)), GPUS["h100"])
