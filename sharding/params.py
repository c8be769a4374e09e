"""The declaration of a weight: its shape, what its axes mean, and where a checkpoint keeps it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Param:
    """One array of a model; sharding, memory plan, initialisation and loading all follow from it.

    The loader's only rule is `tensor.reshape(shape)`: nothing is transposed, so a linear layer stays [out, in] as
    stored. A tuple of sources is stacked along a new leading axis, in order.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # "heads", "kv_heads", "ffn", "vocab", "experts" or None: one a dimension
    source: str | tuple[str, ...]  # the tensor's name in the checkpoint
    optional: bool = False  # may be absent in the checkpoint: the leaf is None then

    def __post_init__(self):
        assert len(self.shape) == len(self.axes), f"{self.source}: shape {self.shape}, axes {self.axes}"
