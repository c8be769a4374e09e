"""Timelines of requests as spans: JSON lines in a file, or sent to an OpenTelemetry collector (OTLP over HTTP, JSON).

Who handles a request on several machines need not be told the trace: its id follows from the request's id.
"""

import json
import logging
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import httpx

from jaxserve.errors import ConfigError

log = logging.getLogger(__name__)
MOST_WAITING = 4096  # spans for the collector; more are dropped, for serving must not wait for it
BATCH, EVERY = 256, 1.0  # spans a message, seconds between two


@dataclass(frozen=True)
class Event:
    """Something that happened at a moment, in seconds since 1970."""

    name: str
    time: float
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Span:
    """A part of a request's way, from `start` to `end` in seconds since 1970."""

    name: str
    trace_id: str  # 32 hexadecimal digits
    start: float
    end: float
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    span_id: str = field(default_factory=lambda: secrets.token_hex(8))
    parent_id: str | None = None


Trace = Callable[[Span], None]


def trace_id(request_id: str) -> str:
    """The trace of a request: its id if that can be one, else a hash of it."""
    if re.fullmatch(r"[0-9a-f]{32}", request_id) and int(request_id, 16):
        return request_id
    return blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def wall(monotonic: float) -> float:
    """A moment of `time.monotonic` in seconds since 1970."""
    return time.time() - (time.monotonic() - monotonic)


def open_trace(file: str | None, endpoint: str | None, service: str) -> Trace | None:
    """Where finished spans go; None if nowhere. ConfigError if the file cannot be written."""
    traces: list[Trace] = [JsonLines(file)] if file else []
    if endpoint:
        traces.append(Collector(endpoint, service))
    if not traces:
        return None

    def every(span: Span) -> None:
        for trace in traces:
            trace(span)

    return every


class JsonLines:
    """A span a line."""

    def __init__(self, path: str):
        self._path = Path(path)
        try:
            self._path.open("a").close()
        except OSError as why:
            raise ConfigError(f"trace_file={path!r} cannot be written: {why.strerror}") from None

    def __call__(self, span: Span) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(span)) + "\n")


class Collector:
    """An OpenTelemetry collector, sent to from a thread of its own."""

    def __init__(self, endpoint: str, service: str):
        self._url, self._service = endpoint.rstrip("/") + "/v1/traces", service
        self._waiting: queue.Queue[Span] = queue.Queue(MOST_WAITING)
        threading.Thread(target=self._send_all, name="trace", daemon=True).start()

    def __call__(self, span: Span) -> None:
        try:
            self._waiting.put_nowait(span)
        except queue.Full:
            log.warning("spans are dropped: %s does not take them fast enough", self._url)

    def _send_all(self) -> None:
        with httpx.Client(timeout=10) as client:
            while True:
                spans = [self._waiting.get()]
                time.sleep(EVERY)
                while len(spans) < BATCH and not self._waiting.empty():
                    spans.append(self._waiting.get())
                try:
                    client.post(self._url, json=otlp(spans, self._service)).raise_for_status()
                except httpx.HTTPError as why:
                    log.warning("%d spans were not taken by %s: %s", len(spans), self._url, why)


def otlp(spans: list[Span], service: str) -> dict[str, Any]:
    """The body of an OTLP/HTTP request (opentelemetry-proto, ExportTraceServiceRequest as JSON)."""
    written = [
        {
            "traceId": span.trace_id,
            "spanId": span.span_id,
            **({"parentSpanId": span.parent_id} if span.parent_id else {}),
            "name": span.name,
            "kind": 2,  # server
            "startTimeUnixNano": _nanoseconds(span.start),
            "endTimeUnixNano": _nanoseconds(span.end),
            "attributes": _attributes(span.attributes),
            "events": [
                {
                    "name": event.name,
                    "timeUnixNano": _nanoseconds(event.time),
                    "attributes": _attributes(event.attributes),
                }
                for event in span.events
            ],
        }
        for span in spans
    ]
    resource = {"attributes": _attributes({"service.name": service})}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": written}]}]}


def _nanoseconds(seconds: float) -> str:
    return str(round(seconds * 1e9))


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(each) for each in value]}}
    return {"stringValue": str(value)}
