"""A device that says what it is told: the engine's own decisions, without a model."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxserve.batch import Row

END = 257  # the end of sequence of the tiny tokenizer, whose tokens below 256 are bytes
DOT = ord(".")


@dataclass
class Scripted:
    """Says `scripts[seed]`, a token a step, and dots after its end; each token as likely as `likely[seed]`."""

    scripts: dict[int, list[int]]
    likely: dict[int, float] = field(default_factory=dict)
    launched: list[list[Row]] = field(default_factory=list)
    fail_at: int | None = None  # the step that raises

    def launch(self, rows: list[Row], told: Any = None) -> SimpleNamespace:
        self.launched.append(rows)
        if len(self.launched) - 1 == self.fail_at:
            raise RuntimeError("the device is gone")
        tokens = [self._token(row) for row in rows]
        logprob = np.array([self.likely.get(row.seed, -1.0) for row in rows], np.float32)
        nobody = np.full((len(rows), 20), -1)
        sampled = SimpleNamespace(
            logprob=logprob, rank=np.ones(len(rows), np.int32), top_ids=nobody, top_logprobs=nobody * 1.0
        )
        read = np.array([tokens, [1] * len(tokens)], np.int32)
        output = SimpleNamespace(sampled=sampled, expert_drops=None)
        return SimpleNamespace(result=lambda: read, output=output, places=None, rows=None)

    def admit(self, slot, admission, group=0) -> None:
        pass

    def close(self) -> None:
        pass

    def _token(self, row: Row) -> int:
        script = self.scripts.get(row.seed, [])
        return script[row.n_out] if row.n_out < len(script) else DOT


def said(text: str, *more: int) -> list[int]:
    """The tokens of a text, one a byte."""
    return [*text.encode(), *more]
