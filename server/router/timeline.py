"""What happened to a request at the router, and when: one span, written when it has ended."""

import time
from typing import Any

from jaxserve.trace import Event, Span, Trace, trace_id, wall


class Timeline:
    """Collects a request's moments; costs almost nothing when nobody traces."""

    def __init__(self, trace: Trace | None, request_id: str, path: str):
        self._trace, self._request_id, self._path = trace, request_id, path
        self._start = time.monotonic()
        self._events: list[Event] = []
        self._tokens: list[float] = []

    def mark(self, name: str, **attributes: Any) -> None:
        """Something happened now."""
        if self._trace:
            self._events.append(Event(name, time.time(), attributes))

    def token(self) -> None:
        """A piece of the answer was passed on now."""
        if self._trace:
            self._tokens.append(round(time.monotonic() - self._start, 6))

    def end(self, status: int, usage: dict[str, Any] | None) -> None:
        """The request has ended, with this status."""
        if not self._trace:
            return
        usage = usage or {}
        attributes = {
            "request_id": self._request_id,
            "path": self._path,
            "status": status,
            "prompt_tokens": usage.get("prompt_tokens"),
            "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            "output_tokens": usage.get("completion_tokens"),
            "piece_seconds": self._tokens,
        }
        start, end = wall(self._start), time.time()
        self._trace(Span("route", trace_id(self._request_id), start, end, attributes, self._events))
