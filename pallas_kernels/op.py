"""An operation: one definition in plain JAX, and the kernels that may stand in for it."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import jax

log = logging.getLogger(__name__)


class Unfit(Exception):
    """A kernel declines these arguments; the message says which, and what would do."""


@dataclass(frozen=True)
class Kernel[**P, R]:
    """One implementation for one platform, with the signature of the op's reference."""

    platform: str  # "tpu" or "gpu"
    fn: Callable[P, R]


class Op[**P, R]:
    """Called like `reference`; runs the first kernel of this platform that fits.

    Tests, benchmarks and the support table all walk `kernels`, so a kernel that is
    listed here is tested, measured and documented without another line.
    """

    def __init__(self, reference: Callable[P, R], **kernels: Kernel[P, R]):
        functools.update_wrapper(self, reference)
        self.name = reference.__name__
        self.reference, self.kernels = reference, kernels

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        for name, kernel in self.here().items():
            try:
                return kernel.fn(*args, **kwargs)
            except Unfit as why:
                _say_once(self.name, name, str(why))
        return self.reference(*args, **kwargs)

    def here(self) -> dict[str, Kernel[P, R]]:
        """The kernels for this platform, the preferred one first."""
        return {name: kernel for name, kernel in self.kernels.items() if kernel.platform == platform()}

    def using(self, name: str) -> Callable[P, R]:
        """This implementation and no other; what it cannot do, it raises."""
        return self.reference if name == "reference" else self.kernels[name].fn


def platform() -> str:
    """What the ambient mesh is made of, so that a step can be lowered for chips that are not here."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = device.platform if device else jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


@functools.lru_cache(maxsize=1024)
def _say_once(op: str, kernel: str, why: str) -> None:
    log.warning("%s: %s kernel not used: %s", op, kernel, why)
