"""What the timing model knows of each TPU generation: clock, matrix units, DMA latency and rate."""

import dataclasses

GRANULE = 32  # bytes per DMA granule (checked against copies of known size)
DMA_STEP = 512  # bytes per "step" of a strided DMA


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published per-CHIP figures; a JAX device is a chip, but half a chip on TPU7x."""

    name: str
    device_kinds: tuple[str, ...]
    cores: int  # TensorCores per chip
    megacore: bool  # both cores form one JAX device
    bf16: float  # FLOP/s
    int8: float  # OP/s, 0: no native int8 matmul
    fp8: float  # FLOP/s
    hbm_bw: float  # bytes/s
    hbm_bytes: float
    vmem_per_core: int  # bytes
    ici_bidir: float  # bytes/s per chip, both directions, all links
    mxus: int  # per core
    mxu_dim: int
    rows_per_cycle: int  # bf16 LHS rows one MXU takes per cycle
    branch_slots: int  # delay slots after sbr
    pop_latency: int  # vmatmul -> vpop, cycles (seen in libtpu's profiler; 0: not used)
    # libtpu's own DMA model, fitted from its static profile of single DMAs (README.md)
    dma_latency_read: float  # cycles, HBM->VMEM
    dma_latency_write: float  # cycles, VMEM->HBM
    dma_rate: float  # bytes per cycle of one DMA
    sources: str

    @property
    def devices_per_chip(self) -> int:
        return 1 if self.megacore or self.cores == 1 else self.cores

    @property
    def flops_per_cycle_core(self) -> int:
        return self.mxus * self.mxu_dim**2 * 2 * self.rows_per_cycle

    @property
    def clock(self) -> float:
        """Derived: published bf16 peak / (MXU multiply-adds per cycle)."""
        return self.bf16 / (self.cores * self.flops_per_cycle_core)

    @property
    def hbm_bw_core(self) -> float:
        return self.hbm_bw / self.cores

    @property
    def hbm_bw_device(self) -> float:
        return self.hbm_bw / self.devices_per_chip


_GC = "docs.cloud.google.com/tpu/docs/"
CHIPS = {
    c.name: c
    for c in [
        Chip(
            "v5e",
            ("TPU v5 lite", "TPU v5e"),
            1,
            False,
            197e12,
            394e12,
            0.0,
            819e9,
            16e9,
            128 << 20,
            400e9,
            4,
            128,
            1,
            4,
            0,
            1133,
            439,
            491,
            _GC + "v5e (197 TFLOPs, 393 TOPs int8, 819 GB/s, 16 GB, ICI 400 GB/s); "
            "jax-ml scaling-book tpus.md (1.5 GHz); jax._src.tpu_info (VMEM)",
        ),
        Chip(
            "v5p",
            ("TPU v5", "TPU v5p"),
            2,
            True,
            459e12,
            918e12,
            0.0,
            2765e9,
            95 * 2**30,
            64 << 20,
            1200e9,
            4,
            128,
            1,
            4,
            0,
            667,
            625,
            1251,
            _GC + "v5p-training (459 TFLOPs, 95 GiB, 2765 GB/s, ICI 1200 GB/s); "
            "scaling-book tpus.md (918 TOPs int8); jax._src.tpu_info (VMEM)",
        ),
        Chip(
            "v6e",
            ("TPU v6 lite", "TPU v6e"),
            1,
            False,
            918e12,
            1836e12,
            918e12,
            1638e9,
            32e9,
            128 << 20,
            800e9,
            2,
            256,
            2,
            4,
            0,
            547,
            455,
            776,
            _GC + "v6e (918 TFLOPs, 1836 TOPs int8, 32 GB, 1638 GB/s, ICI 800 GB/s, two "
            "256x256 MXUs); " + _GC + "tpu7x (918 TFLOPs fp8)",
        ),
        Chip(
            "tpu7x",
            ("TPU7x",),
            2,
            False,
            2307e12,
            0.0,
            4614e12,
            7370e9,
            192e9,
            64 << 20,
            1200e9,
            2,
            256,
            2,
            6,
            104,
            692,
            595,
            1688,
            _GC + "tpu7x (2307 TFLOPs bf16, 4614 fp8, 192 GB, ~7.37 TB/s, 2 TensorCores, "
            "ICI 200 GB/s bidirectional per axis, 3 axes)",
        ),
    ]
}


def chip_for(name: str) -> Chip:
    """From a chip name, a topology name ('v6e:2x2') or a device kind."""
    key = name.split(":")[0].lower()
    key = {"v7": "tpu7x", "v7x": "tpu7x", "tpu7": "tpu7x"}.get(key, key)
    if key in CHIPS:
        return CHIPS[key]
    for chip in CHIPS.values():
        if name in chip.device_kinds:
            return chip
    raise KeyError(f"unknown chip or topology {name!r}; known: {', '.join(CHIPS)}")
