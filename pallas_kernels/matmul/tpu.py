"""matmul on TPU: weights cross from HBM as they are stored, become operands in VMEM, and are multiplied there.

Few rows stay in VMEM while whole rows of the weight stream past; many rows are cut in square tiles.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import chip, tuning
from pallas_kernels.formats import Format, QTensor
from pallas_kernels.matmul import tpu_body, tpu_weights
from pallas_kernels.matmul.tpu_body import Static, padded
from pallas_kernels.matmul.tpu_weights import LANES, SUBLANES
from pallas_kernels.op import Unfit

FEW_ROWS = 256  # all in one tile
MANY = {"rows": 1024, "outputs": 1024, "columns": 1024}  # enough to use each byte a thousand times
LATE = 256  # rows, a copy for each group in as many columns as the unit is deep, cheaper than scaled weights
SHALLOW_LATE = 64  # the same with packed codes where the matrix unit is 128 deep
STREAM_BYTES = 4 << 20  # of codes in one tile: long enough to hide the latency of the next copy
CHUNK = 512  # code columns unpacked at once: enough to fill the schedule, few enough not to spill
LONG_CHUNK = 4096  # the same of operands of eight bits, made on their way: each start costs about 150 cycles
ROWS_BYTES = 16 << 20  # of rows kept in VMEM


class Weight(NamedTuple):
    """A stack of weights, taken apart."""

    codes: Any  # [L, F, D] or [L, F, D / 2]
    scales: Any  # [L, ...] or None
    zeros: Any
    columns: Any  # [L, 1, F] or [L, 1, 1] float32, or None
    format: Any  # Format, or None for a plain weight


def matmul(x, w, *, layer=None, blocks: Mapping[str, int] | None = None):
    """See `reference.matmul`. BF16 rows; D a multiple of 128, or of 256 where two codes share a byte."""
    if layer is None:
        w, layer = jax.tree.map(lambda leaf: leaf[None], w), np.int32(0)
    check(x, w)
    weight = taken_apart(w)
    t, (f, d), here = x.shape[0], w.shape[-2:], chip.ambient()
    key = {"rows": t, "outputs": f, "columns": d, "bits": bits(weight.format)}
    blocks = blocks or tuning.nearest("matmul", here, key) or rule(t, weight.format)
    s, groups = static(t, f, d, weight, here, blocks)
    steps_d = weight.codes.shape[-1] // s.width
    grid = (pl.cdiv(f, s.outputs), pl.cdiv(t, s.rows), steps_d)
    specs, inputs = weight_specs(weight, s, groups, lambda _i, k, layer: (layer[0], k))
    rows = tpu_body.arranged(x, s)
    return pl.pallas_call(
        functools.partial(_body, s, steps_d - 1),
        out_shape=jax.ShapeDtypeStruct((t, f), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[rows_spec(rows, s, lambda i, k, _: (i, k)), *specs],
            out_specs=pl.BlockSpec((s.rows, s.outputs), lambda j, i, k, _: (i, j)),
            scratch_shapes=tpu_body.scratch(s, groups),
        ),
        compiler_params=tpu_body.compiler_params(here.vmem_bytes),
        name="matmul_" + (weight.format.name if weight.format else "bf16"),
    )(jnp.asarray(layer, jnp.int32).reshape(1), rows, *inputs)


def _body(s: Static, last: int, _layer, *refs) -> None:
    r = tpu_body.refs_of(s, list(refs))
    row = pl.multiple_of(pl.program_id(1) * s.rows, s.rows) if s.resident else 0

    def store(tile):
        r.out[...] = tile

    tpu_body.multiply(s, r, pl.program_id(0), pl.program_id(2), last, row, store)


def taken_apart(w) -> Weight:
    """The leaves of a stack of weights; scales of whole rows and of the whole weight are factors of its outputs."""
    if not isinstance(w, QTensor):
        return Weight(w, None, None, None, None)
    if tpu_weights.grouped(w.format) or tpu_body.blocked(w.format):
        whole = None if w.tensor_scale is None else w.tensor_scale[:, None, None]
        return Weight(w.codes, w.scales, w.zeros, whole, w.format)
    return Weight(w.codes, None, None, w.scales.reshape(-1, 1, w.shape[-2]), w.format)


def check(x, w) -> None:
    """Refuse what the tiles of the chip do not fit."""
    d, format = x.shape[-1], getattr(w, "format", None)
    unit = 2 * LANES if format is not None and format.packed else LANES
    if x.dtype != jnp.bfloat16 or (format is None and w.dtype != jnp.bfloat16):
        raise Unfit(
            f"rows are {x.dtype} and the weight is {w.dtype if format is None else format.name}; rows must be bfloat16"
        )
    if d % unit:
        raise Unfit(f"D={d} must be a multiple of {unit}; pad the rows and the weight with zeros")
    if format is None:
        return
    if format.codes not in tpu_weights.CODES or (format.zeros and not format.packed):
        raise Unfit(f"{format.name}: codes of {', '.join(tpu_weights.CODES)}, zero points with 4 bits only")
    groups = tpu_weights.grouped(format) and format.packed
    if not groups and not tpu_body.blocked(format) and format.block != (1, 0):
        raise Unfit(
            f"blocks of {format.block} of {format.codes}: only 128 x 128, rows, and groups of 4 bits in a row"
        )
    if groups and w.scales.dtype not in (jnp.bfloat16, jnp.uint8, jnp.float8_e4m3fn):
        raise Unfit(f"{format.name} with {w.scales.dtype} scales; store the scales as bfloat16")


def static(
    t: int, f: int, d: int, w: Weight, here: chip.Chip, found: Mapping[str, int]
) -> tuple[Static, int]:
    """How one call is cut by these block sizes, and the groups of a row, rounded up to whole tiles."""
    packed = 2 if w.format is not None and w.format.packed else 1
    width = _divisor(d // packed, found["columns"] // packed)
    native = here.name == "tpu7x"
    rows = min(found["rows"], padded(t, 16))
    outputs = min(found["outputs"], padded(f, 2 * LANES))
    groups = padded(w.scales.shape[-1], LANES) if w.format and tpu_weights.grouped(w.format) else 0
    resident = padded(t, rows) * d * 2 <= ROWS_BYTES
    turned = w.scales is not None and _lies_turned(*w.scales.shape[-2:])
    s = Static(w.format, rows, outputs, width, 0, native, resident, _late(w.format, rows, here), turned)
    most = CHUNK if s.prepared else width if s.direct and not s.late else LONG_CHUNK
    s = s._replace(chunk=_divisor(width, most))
    need = tpu_body.tile_bytes(s, 2 * (padded(t, rows) * d if resident else rows * width * packed), groups)
    if need > here.vmem_bytes * 7 // 8:
        raise Unfit(
            f"tiles of {rows} x {outputs} x {width} take {need >> 20} MiB of VMEM; use smaller blocks"
        )
    return s, groups


def _late(format: Format | None, rows: int, here: chip.Chip) -> bool:
    """Whether so few rows are that scales, exactly, multiply sums of groups and blocks instead of weights."""
    if format is None or not format.block[1] or tpu_body.DEPTH % format.block[1]:
        return False
    shallow = format.packed and here.name in ("v5e", "v5p")
    return rows * (tpu_body.DEPTH // format.block[1]) <= (SHALLOW_LATE if shallow else LATE)


def _lies_turned(f: int, groups: int) -> bool:
    """Whether XLA lays scales, [F, groups] or of blocks, out with F along the lanes: where that wastes less memory.

    The kernel must take them as they lie: otherwise all layers' scales are copied in every call.
    """
    return padded(f, LANES) * padded(groups, SUBLANES) < padded(f, SUBLANES) * padded(groups, LANES)


def bits(format: Format | None) -> int:
    """Of one code."""
    return 16 if format is None else 4 if format.packed else 8


def rule(t: int, format: Format | None, stream_bytes: int = STREAM_BYTES) -> dict[str, int]:
    """Block sizes for `t` rows, codes coming `stream_bytes` at a time where they are few."""
    if t > FEW_ROWS:
        return MANY
    return {"rows": FEW_ROWS, "outputs": 512, "columns": stream_bytes * 8 // (512 * bits(format))}


def _divisor(width: int, most: int) -> int:
    """The largest multiple of 128 that divides `width` and is at most `most`, or 128."""
    return max((i for i in range(LANES, min(width, most) + 1, LANES) if width % i == 0), default=LANES)


def rows_spec(rows, s: Static, which) -> pl.BlockSpec:
    """All rows, or tiles of them: `which(i, k, *scalars)` says which one step (i, k) takes, and which columns."""
    if s.resident:
        whole = (padded(rows.shape[0], s.rows), rows.shape[1])
        return pl.BlockSpec(whole, lambda *_: (0, 0), pipeline_mode=pl.Buffered(1))
    return pl.BlockSpec((s.rows, s.width * s.packed), lambda j, i, k, *at: which(i, k, *at))


def weight_specs(w: Weight, s: Static, groups: int, which) -> tuple[list, list]:
    """Block specs and arrays of a stack of weights; `which(i, k, *scalars)` says which one, which columns."""

    def tile(j, i, k, *at):
        weight, columns = which(i, k, *at)
        return weight, j, columns

    codes = pl.BlockSpec((None, s.outputs, s.width), tile)
    specs, inputs = [codes], [w.codes]

    def turn(x):
        return x.swapaxes(1, 2) if s.turned else x

    if tpu_weights.grouped(w.format):
        rows = pl.BlockSpec((None, s.outputs, groups), lambda j, i, k, *at: (which(i, k, *at)[0], j, 0))
        if s.turned:
            rows = pl.BlockSpec((None, groups, s.outputs), lambda j, i, k, *at: (which(i, k, *at)[0], 0, j))
        for values in (w.scales, w.zeros):
            if values is not None:
                specs.append(rows)
                inputs.append(turn(values))
    elif w.scales is not None:
        scales = turn(w.scales)
        specs.append(
            pl.BlockSpec(
                (None, *scales.shape[1:]),
                lambda j, i, k, *at: (which(i, k, *at)[0], 0, 0),
                memory_space=pltpu.SMEM,
            )
        )
        inputs.append(scales)
    if w.columns is not None:
        whole = w.columns.shape[-1] == 1
        specs.append(
            pl.BlockSpec(
                (None, 1, 1 if whole else s.outputs),
                lambda j, i, k, *at: (which(i, k, *at)[0], 0, 0 if whole else j),
                memory_space=pltpu.SMEM if whole else None,
            )
        )
        inputs.append(w.columns)
    return specs, inputs
