"""What a step computed, on the host: the tokens at once, everything else only if somebody asks."""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxserve.runner import Pending


class Found(NamedTuple):
    """Log-probabilities, one entry a row."""

    logprob: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


class Readout:
    """Waits for a launched step; the rest is fetched from the device when it is first used."""

    def __init__(self, pending: Pending):
        self._output = pending.output
        self._places, self._rows = pending.places, pending.rows
        self.tokens, self.finite = pending.result().tolist()

    @property
    def expert_drops(self) -> int:
        """Choices of experts that found no room, over all layers."""
        drops = self._output.expert_drops
        return 0 if drops is None else int(np.sum(np.asarray(drops)))

    @cached_property
    def sampled(self) -> Found:
        """Of the sampled tokens, one row a sequence."""
        return _fetched(self._output.sampled, self._places)

    @cached_property
    def scores(self) -> Found:
        """Of the tokens that follow in a prompt, one row a new token."""
        return _fetched(self._output.scores, self._rows)

    @cached_property
    def hidden(self) -> np.ndarray:
        """float32 [T, D]."""
        return _ordered(np.asarray(self._output.hidden, np.float32), self._rows)


def _fetched(arrays, places: np.ndarray | None) -> Found:
    return Found(*(_ordered(np.asarray(getattr(arrays, name)), places) for name in Found._fields))


def _ordered(rows: np.ndarray, places: np.ndarray | None) -> np.ndarray:
    """The rows of what was launched, in that order."""
    return rows if places is None else rows[places]
