"""What a worker says of itself before pages go anywhere, and why two workers cannot exchange any."""

import dataclasses
import hashlib
import importlib.metadata
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.handover.messages import Incompatible
from jaxserve.models import ModelConfig
from kv import wire
from pallas_kernels.pages import LOW_BITS

PROTOCOL = 2
TRAVELS = (*wire.PLAIN, *LOW_BITS)  # data types of caches whose rows can be handed over
EQUAL = ("protocol", "model", "layers", "row")  # what a pair must agree in, and the release of jaxserve


@dataclass(frozen=True)
class Handshake:
    """A worker's model, cache and links. `epoch` changes with every start of the process."""

    role: str
    epoch: str
    model: str  # hash of the config and of the weights as loaded
    name: str
    layers: int
    row: tuple[int, ...]  # what a token leaves in one layer
    dtype: str  # of the cache
    page_size: int
    tensor_parallel_size: int
    limits: dict[str, int]
    transfer: dict[str, str]  # links it offers pages over, and their addresses
    versions: dict[str, str]
    protocol: int = PROTOCOL

    def written(self) -> dict[str, Any]:
        """As JSON."""
        return dataclasses.asdict(self) | {"row": list(self.row)}

    @classmethod
    def read(cls, found: dict[str, Any]) -> "Handshake":
        """From JSON; Incompatible if it is not one of ours."""
        names = {field.name for field in dataclasses.fields(cls)}
        if found.get("protocol") != PROTOCOL or found.keys() != names:
            theirs = found.get("protocol")
            raise Incompatible(
                f"protocol is {PROTOCOL} here and {theirs!r} there; run the same release of jaxserve"
            )
        fields: dict[str, Any] = found | {"row": tuple(found["row"])}
        return cls(**fields)

    def link_to(self, other: "Handshake", preferred: str) -> str:
        """The kind of link over which `other`'s pages come here; Incompatible with the field that forbids it."""
        for name in EQUAL:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise Incompatible(f"{name} is {ours} here and {theirs} there; both workers need the same")
        for dtype in (self.dtype, other.dtype):
            if dtype not in TRAVELS:
                raise Incompatible(f"dtype {dtype!r} cannot be handed over; use one of {', '.join(TRAVELS)}")
        try:
            wire.wire_dtype(other.dtype, self.dtype)
        except ValueError as why:
            raise Incompatible(str(why)) from why
        ours, theirs = self.versions["jaxserve"], other.versions["jaxserve"]
        if ours != theirs:
            raise Incompatible(f"jaxserve is {ours} here and {theirs} there; run the same release")
        shared = [
            kind for kind in (preferred, *self.transfer) if kind in self.transfer and kind in other.transfer
        ]
        if not shared:
            raise Incompatible(
                f"transfer is over {', '.join(self.transfer)} here and {', '.join(other.transfer)} there; "
                "give both the same --kv-transfer"
            )
        return shared[0]


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jaxserve", "jax")}


def fingerprint(config: ModelConfig, params: Any) -> str:
    """Hash of what the model computes: its config and every bit of its weights as loaded, wherever they lie.

    Pages of a model that was quantised otherwise, or has one other weight, are not this model's.
    """
    shown = repr(dataclasses.replace(config, name="", max_model_len=0))
    digest = hashlib.sha256(shown.encode())
    for path, leaf in jax.tree.leaves_with_path(params):
        sums = np.asarray(_checksum(leaf)).tobytes()
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode() + sums)
    return digest.hexdigest()


@jax.jit
def _checksum(leaf: jax.Array) -> jax.Array:
    if leaf.dtype in (jnp.int4, jnp.uint4, jnp.float4_e2m1fn, jnp.bool_):
        leaf = leaf.astype(jnp.float32)
    return wire.checksum(leaf)
