"""The operations under the ambient mesh: each device computes its heads, or its part of the vocabulary.

Called like the operations themselves, and nothing else where no axis of the mesh divides heads.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, Shaped

from pallas_kernels import matmul as multiplying
from pallas_kernels import mla_attention as latents
from pallas_kernels import page_write as page_writing
from pallas_kernels import paged_attention as paging
from pallas_kernels.formats import QTensor
from pallas_kernels.pages import ScaledPages, ScaledRows, is_latent
from sharding.mesh import TENSOR
from sharding.rules import OVER


def paged_attention(
    q: Float[Array, "T N H"],
    pages: Array | ScaledPages,
    page_table: Int[Array, "B P"],
    q_starts: Int[Array, "B+1"],
    kv_lens: Int[Array, "B"],
    *,
    sinks: Float[Array, "N"] | None = None,
    **options: Any,
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """See `pallas_kernels.paged_attention`. Query heads are divided, and kv heads as far as they go."""
    heads = divided(TENSOR)
    specs = (P(None, heads), kv_heads_spec(pages), P(), P(), P())
    return everywhere(
        paging.paged_attention, heads, specs, (P(None, heads),) * 2, {"sinks": P(heads)},
        q, pages, page_table, q_starts, kv_lens, sinks=sinks, **options,
    )  # fmt: skip


def mla_attention(
    q_latent: Float[Array, "T N C"],
    q_rope: Float[Array, "T N R"],
    pages: Array | ScaledPages,
    page_table: Int[Array, "B P"],
    q_starts: Int[Array, "B+1"],
    kv_lens: Int[Array, "B"],
    **options: Any,
) -> tuple[Float[Array, "T N C"], Float[Array, "T N"]]:
    """See `pallas_kernels.mla_attention`. Heads are divided; every device reads all latents of its sequences."""
    heads = P(None, divided(TENSOR))
    return everywhere(
        latents.mla_attention, divided(TENSOR), (heads, heads, P(), P(), P(), P()), (heads, heads), {},
        q_latent, q_rope, pages, page_table, q_starts, kv_lens, **options,
    )  # fmt: skip


def page_write(
    pages: Array | ScaledPages,
    rows: Float[Array, "T K W"] | Float[Array, "T W"] | ScaledRows,
    places: Int[Array, "T"],
    *,
    layer: Int[Array, ""] | None = None,
) -> Array | ScaledPages:
    """See `pallas_kernels.page_write`. Latents, which have no heads, are kept by every device."""
    latent = is_latent(rows)
    spec = P() if latent else kv_heads_spec(pages)
    specs = (spec, P() if latent else P(None, divided(TENSOR[:1])), P())
    return everywhere(
        page_writing.page_write, divided(TENSOR), specs, spec, {}, pages, rows, places, layer=layer
    )


def matmul(
    x: Float[Array, "T D"], w: QTensor | Float[Array, "*L F D"], *, layer: Int[Array, ""] | None = None
) -> Float[Array, "T F"]:
    """See `pallas_kernels.matmul`. Of a packed weight each device has the rows or the columns that its `axes` say."""
    tensor = divided(TENSOR)
    if not tensor or not isinstance(w, QTensor):
        return multiplying.matmul(x, w, layer=layer)
    rows, columns = (divided(OVER.get(axis or "", ())) or None for axis in w.axes or (None, None))
    stack = (None,) * (len(w.shape) - 2)
    block_rows, block_columns = w.format.block  # 0: one scale for all of them
    scales = P(*stack, rows if block_rows else None, columns if block_columns else None)
    specs = replace(
        w,
        codes=P(*stack, rows, columns),
        scales=None if w.scales is None else scales,
        zeros=None if w.zeros is None else scales,
        tensor_scale=None if w.tensor_scale is None else P(),
    )

    def local(x: Array, w: QTensor, layer: Array | None) -> Array:
        out = multiplying.matmul(x, w, layer=layer)
        return lax.psum(out.astype(jnp.float32), columns).astype(x.dtype) if columns else out

    return mapped(local, tensor, (P(None, columns), specs, P()), P(None, rows))(x, w, layer)


def embedding(table: Shaped[Array, "V D"], tokens: Int[Array, "T"]) -> Shaped[Array, "T D"]:
    """The tokens' rows; a token outside of the vocabulary has its first or last one. The vocabulary is divided."""
    vocab = divided(TENSOR)
    if not vocab:
        return jnp.take(table, tokens, axis=0, mode="clip")

    def local(table, tokens):
        at = tokens - lax.axis_index(vocab) * table.shape[0]
        here = (at >= 0) & (at < table.shape[0])
        rows = jnp.take(table, jnp.where(here, at, 0), axis=0, mode="clip")
        return lax.psum(jnp.where(here[:, None], rows, jnp.zeros((), rows.dtype)), vocab)

    tokens = jnp.clip(tokens, 0, table.shape[0] - 1)
    return mapped(local, vocab, (P(vocab), P()), P())(table, tokens)


def whole(x: Array) -> Array:
    """`x` in full on each of the devices that share heads, where its last axis was divided among them."""
    tensor = divided(TENSOR)
    if not tensor:
        return x
    # Said with a sharding constraint, XLA may gather the weights that x is made with rather than x.
    parts = P(*[None] * (x.ndim - 1), tensor)
    return mapped(lambda x: lax.all_gather(x, tensor, axis=x.ndim - 1, tiled=True), tensor, (parts,), P())(x)


def divided(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `axes` that divide arrays which the code here sees as whole: not those of a `shard_map` around it."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(n for n, kind in kinds if n in axes and kind == AxisType.Auto and mesh.shape[n] > 1)


def kv_heads_spec(pages: Array | ScaledPages) -> Any:
    """Pages [*L, pages, K, page, 2H], and scales [*L, pages, 2, K, page], by kv head."""
    kv = divided(TENSOR[:1]) or None
    if isinstance(pages, ScaledPages):
        values, scales = pages
        return ScaledPages(P(*[None] * (values.ndim - 3), kv), P(*[None] * (scales.ndim - 2), kv))  # type: ignore[arg-type]
    return P(*[None] * (pages.ndim - 3), kv)


def everywhere(
    op: Callable[..., Any],
    axes: tuple[str, ...],
    specs: tuple[Any, ...],
    out: Any,
    option_specs: dict[str, P],
    *args: Any,
    **options: Any,
) -> Any:
    """`op` on each device's part; an option that is an array and not in `option_specs` is the same for all."""
    if not axes:
        return op(*args, **options)
    arrays = {name: value for name, value in options.items() if isinstance(value, Array)}
    fixed = {name: value for name, value in options.items() if name not in arrays}

    def local(arrays: dict[str, Array], *args: Any) -> Any:
        return op(*args, **arrays, **fixed)

    in_specs = ({name: option_specs.get(name, P()) for name in arrays}, *specs)
    return mapped(local, axes, in_specs, out)(arrays, *args)


def mapped(
    fn: Callable[..., Any], axes: tuple[str, ...], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`fn` on each device's part along `axes`, and along those of one device: a kernel runs where no axis is left."""
    mesh = jax.sharding.get_abstract_mesh()
    idle = {name for name in mesh.axis_names if mesh.shape[name] == 1}
    names = set(axes) | (idle - set(mesh.manual_axes))
    # Kernels do not say over which axes their results vary, so it is not checked.
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False)
