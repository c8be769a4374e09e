"""Stop strings in a stream of text: found across token borders, and never shown in part."""


class StopStrings:
    """Passes text on until a stop string is complete, holding back whatever may turn out to be one.

    The stop string that is complete first wins; of several complete at the same character, the longest. So
    the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: tuple[str, ...], include: bool):
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self.stops, self.include = stops, include
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that can be shown now, and the stop string that ended it, if one did.

        With `include` the text goes up to the end of the stop string, otherwise up to its start. What comes
        after a match is dropped.
        """
        if self._matched is not None:
            return "", self._matched
        text, self._held = self._held + text, ""
        found = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, self._matched = min(found)
            return text[: end if self.include else start], self._matched
        safe = len(text) - self._partial(text)
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """The text held back, now that nothing more comes."""
        text, self._held = self._held, ""
        return text

    def _partial(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) for stop in self.stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self.stops):
                return length
        return 0
