"""A circuit breaker: who fails again and again is left alone for a while, then tried with one request."""

FAILURES = 3  # in a row
FIRST_REST, LONGEST_REST = 1.0, 60.0  # seconds; doubled each time the trial fails


class Breaker:
    """Whether a worker may be given requests; `now` is in seconds of any clock that does not go back."""

    def __init__(self) -> None:
        self._failures = 0  # in a row
        self._rest = FIRST_REST
        self._until: float | None = None  # while open: when a trial is due
        self._trial: float | None = None  # when the running trial began

    def state(self, now: float) -> str:
        """`closed` (all is well), `open` (left alone) or `trying` (one request may find out)."""
        if self._until is None:
            return "closed"
        return "open" if now < self._until else "trying"

    def allows(self, now: float) -> bool:
        """Whether a request may be sent now."""
        if self._until is None:
            return True
        under_way = self._trial is not None and now - self._trial < self._rest
        return now >= self._until and not under_way

    def sent(self, now: float) -> None:
        """A request was sent."""
        if self._until is not None:
            self._trial = now

    def succeeded(self) -> None:
        """A request was answered."""
        self.__init__()

    def failed(self, now: float) -> None:
        """A request failed by the worker's fault."""
        self._failures += 1
        if self._until is not None:
            if self._trial is None and now < self._until:
                return  # sent before it opened
            self._rest = min(2 * self._rest, LONGEST_REST)
        elif self._failures < FAILURES:
            return
        self._until, self._trial = now + self._rest, None


class Budget:
    """Extra requests (retries, hedges) as a part of all: a burst at first, then no more than `part` of them."""

    def __init__(self, part: float, burst: float = 10.0):
        self._part, self._most, self._left = part, burst, burst

    def earn(self) -> None:
        """A request came."""
        self._left = min(self._left + self._part, self._most)

    def spend(self) -> bool:
        """Whether an extra request may be sent; counted if so."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
