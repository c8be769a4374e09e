"""How a page holds latents: [2 * C/128 + 1, page/2, 128], every lane of every tile used.

Row i of a page holds tokens 2i and 2i + 1. Slabs 0 .. C/128-1 are the latents of the even tokens, 128 columns each,
the next C/128 those of the odd ones; the last slab holds the rope keys, 64 values of the even token and then 64 of
the odd. A plain [page, 576] array would lie in a TPU's memory with 640 columns, and would be read so.
"""

import jax.numpy as jnp
from jax import Array

LANES = 128
ROPE = 64


def page_shape(latent: int, page: int) -> tuple[int, int, int]:
    """The shape of one page of `page` tokens with `latent` + 64 values each."""
    return 2 * (latent // LANES) + 1, page // 2, LANES


def latent_of(pages: Array) -> int:
    """How many of a token's values are latent."""
    return (pages.shape[-3] - 1) // 2 * LANES


def packed(latent: Array, rope: Array) -> Array:
    """[..., page, C] and [..., page, 64] -> [..., 2 * C/128 + 1, page/2, 128]."""
    *lead, page, width = latent.shape
    slabs = latent.reshape(*lead, page // 2, 2 * (width // LANES), LANES)
    ropes = rope.reshape(*lead, page // 2, 1, LANES)
    return jnp.swapaxes(jnp.concatenate([slabs, ropes], axis=-2), -3, -2)


def unpacked(pages: Array) -> tuple[Array, Array]:
    """The inverse of `packed`."""
    *lead, _, half, _ = pages.shape
    rows = jnp.swapaxes(pages, -3, -2)
    return (
        rows[..., :-1, :].reshape(*lead, 2 * half, latent_of(pages)),
        rows[..., -1, :].reshape(*lead, 2 * half, ROPE),
    )


def quantized(values: Array) -> tuple[Array, Array]:
    """[..., 576] as (float8_e4m3fn values, float32 scales [...]), a scale for each token; never -0.

    The kernels may read the bits as another kind of 8-bit float, in which -0 stands for NaN.
    """
    values = values.astype(jnp.float32)
    largest = jnp.max(jnp.abs(values), axis=-1)
    scales = jnp.where(largest > 0, largest / float(jnp.finfo(jnp.float8_e4m3fn).max), 1.0)
    small = (values / scales[..., None]).astype(jnp.float8_e4m3fn)
    return jnp.where(small == 0, jnp.zeros_like(small), small), scales


def put(pages: Array, latent: Array, rope: Array, places: Array) -> Array:
    """`pages` with row t of `latent` [T, C] and `rope` [T, 64] at places[t] = page * page_size + offset.

    Donate `pages`, and nothing is copied. Places may repeat only where the content does not matter.
    """
    half, slabs = pages.shape[-2], latent.shape[-1] // LANES
    page, row, odd = places // (2 * half), places % (2 * half) // 2, places % 2
    slab = odd[:, None] * slabs + jnp.arange(slabs, dtype=places.dtype)[None]
    lane = odd[:, None] * ROPE + jnp.arange(ROPE, dtype=places.dtype)[None]
    latent = latent.reshape(-1, slabs, LANES).astype(pages.dtype)
    pages = pages.at[page[:, None], slab, row[:, None]].set(latent)
    return pages.at[page[:, None], 2 * slabs, row[:, None], lane].set(rope.astype(pages.dtype))
