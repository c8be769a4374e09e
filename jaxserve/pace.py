"""How long steps take, measured as they run: what decoding costs, and what each prompt token adds."""

import threading
from typing import NamedTuple

import numpy as np

FORGET = 0.995  # weight of the steps so far at each new one: some two hundred steps count
ENOUGH = 8  # steps


class Pace(NamedTuple):
    """Seconds of a step: `base + prompt_token * prompt tokens + sequence * decoding sequences`."""

    base: float
    prompt_token: float
    sequence: float

    def seconds(self, prompt_tokens: float, sequences: float) -> float:
        return self.base + self.prompt_token * prompt_tokens + self.sequence * sequences


class StepTimes:
    """Fits a Pace to the latest steps by least squares, older ones counting less; any thread may ask for it."""

    def __init__(self) -> None:
        self._products = np.zeros((3, 3))
        self._sums = np.zeros(3)
        self._steps = 0
        self._lock = threading.Lock()

    def observe(self, prompt_tokens: int, sequences: int, seconds: float) -> None:
        """A step computed so many prompt tokens and one token each of so many sequences."""
        x = np.array([1.0, prompt_tokens, sequences])
        with self._lock:
            self._products = FORGET * self._products + np.outer(x, x)
            self._sums = FORGET * self._sums + seconds * x
            self._steps += 1

    def pace(self) -> Pace | None:
        """None until enough steps ran to tell."""
        with self._lock:
            if self._steps < ENOUGH:
                return None
            products, sums = self._products.copy(), self._sums.copy()
        return Pace(*_nonnegative(products, sums))


def _nonnegative(products: np.ndarray, sums: np.ndarray) -> list[float]:
    """The least-squares solution without negative parts; what never varied gets the share that explains most."""
    kept = [i for i in range(3) if products[i, i] > 0]
    while kept:
        scale = np.sqrt(products[kept, kept])  # columns of unit length, so that small ones are not lost
        matrix = products[np.ix_(kept, kept)] / np.outer(scale, scale)
        found = np.linalg.lstsq(matrix, sums[kept] / scale, rcond=1e-6)[0] / scale
        if found.min() >= 0:
            values = [0.0, 0.0, 0.0]
            for i, value in zip(kept, found, strict=True):
                values[i] = float(value)
            return values
        kept.pop(int(found.argmin()))
    return [0.0, 0.0, 0.0]
