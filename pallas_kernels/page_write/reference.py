"""The definition of page_write."""

from jax import Array
from jaxtyping import Float, Int


def page_write(
    pages: Float[Array, "*L pages K page W"],
    rows: Float[Array, "T K W"],
    places: Int[Array, "T"],
    *,
    layer: Int[Array, ""] | None = None,
) -> Float[Array, "*L pages K page W"]:
    """`pages` with row t at `places[t]` = page * page_size + offset within the page.

    W is what a head keeps of a token: its key and value side by side. Donate `pages`, and
    nothing is copied. Rows of one page come one after the other. Places may repeat only where the
    content does not matter (padding goes to page 0).
    With `layer`, `pages` is the stack of all layers' pages, and this layer's are written.
    """
    size = pages.shape[-2]
    at = (places // size, slice(None), places % size)
    at = at if layer is None else (layer, *at)
    return pages.at[at].set(rows.astype(pages.dtype), mode="promise_in_bounds")


def cost(pages: Array, rows: Array, places: Array, **_) -> tuple[int, int]:
    """(floating-point operations, bytes to and from HBM) of one call."""
    return 0, rows.nbytes + rows.size * pages.dtype.itemsize + places.nbytes
