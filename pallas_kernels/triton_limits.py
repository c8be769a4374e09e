"""What Triton asks of the arrays of GPU kernels: offsets that fit, scalars that are arrays, zeros of the right kind."""

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton

from pallas_kernels.op import Unfit


def check_addresses(**arrays) -> None:
    """Refuse arrays whose elements Pallas counts in 32 bits although they are more than 2^31.

    It takes 64 bits from 2^32 bytes on (jax/_src/pallas/triton/lowering.py), so only arrays of bytes are concerned.
    """
    for name, array in arrays.items():
        if array.size > 1 << 31 and array.size * array.dtype.itemsize <= 1 << 32:
            raise Unfit(
                f"{name} holds {array.size} values of {array.dtype}, between 2 and 4 GiB, which Triton cannot "
                f"address; split it, or make it larger than 4 GiB"
            )


def layer_index(layer) -> Array:
    """The layer number as an array [1], as kernels without scalar operands take it; 0 where there is no stack."""
    return jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1)


def load(ref, mask: Array | None = None) -> Array:
    """What `ref` refers to; zeros where `mask` does not hold."""
    if mask is None:
        return triton.load(ref)
    nothing = 0.0 if jnp.issubdtype(ref.dtype, jnp.floating) else 0
    return triton.load(ref, mask=jnp.broadcast_to(mask, ref.shape), other=nothing)
