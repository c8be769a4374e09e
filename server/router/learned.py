"""What the router has learnt from the answers so far: their length, and by how much its predictions err."""

import math

LATEST = 0.05  # weight of the newest answer
WINDOW = 60.0  # seconds


class Mean:
    """A mean in which older values count less."""

    def __init__(self, value: float | None = None):
        self.value = value

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + LATEST * (value - self.value)

    def or_else(self, default: float) -> float:
        return default if self.value is None else self.value


class Rate:
    """How much of something comes a second, over the last minute or so."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._at: float | None = None

    def add(self, amount: float, now: float) -> None:
        """`now` is in seconds of any clock."""
        self._sum = self.a_second(now) * WINDOW + amount

    def a_second(self, now: float) -> float:
        if self._at is not None:
            self._sum *= math.exp((self._at - now) / WINDOW)
        self._at = now
        return self._sum / WINDOW


class Learned:
    """Means over the answers of all workers, and how much they come to."""

    def __init__(self) -> None:
        self.output_tokens = Mean()  # of an answer
        self.computed_tokens = Mean()  # of a prompt: those that were not cached
        self.prompt_tokens = Mean()
        self.ttft_error = Mean()  # seconds, without sign
        self.prompt_seconds = Rate()  # of work
        self.answer_seconds = Rate()

    def expected_output(self, limit: int | None) -> float:
        """Tokens of the next answer, of which `limit` are allowed."""
        usual = self.output_tokens.or_else(64.0 if limit is None else limit)
        return usual if limit is None else min(usual, limit)
