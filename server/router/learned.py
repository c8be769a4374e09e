"""What the router has learnt from the answers so far: their length, and by how much its predictions err."""

LATEST = 0.05  # weight of the newest answer


class Mean:
    """A mean in which older values count less."""

    def __init__(self, value: float | None = None):
        self.value = value

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + LATEST * (value - self.value)

    def or_else(self, default: float) -> float:
        return default if self.value is None else self.value


class Learned:
    """Means over the answers of all workers."""

    def __init__(self) -> None:
        self.output_tokens = Mean()  # of an answer
        self.computed_tokens = Mean()  # of a prompt: those that were not cached
        self.prompt_tokens = Mean()
        self.ttft_error = Mean()  # seconds, without sign

    def expected_output(self, limit: int | None) -> float:
        """Tokens of the next answer, of which `limit` are allowed."""
        usual = self.output_tokens.or_else(64.0 if limit is None else limit)
        return usual if limit is None else min(usual, limit)
