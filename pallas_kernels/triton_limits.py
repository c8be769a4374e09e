"""What Triton asks of every GPU kernel's arrays: offsets that fit, and scalars that are arrays."""

import jax.numpy as jnp
from jax import Array

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
