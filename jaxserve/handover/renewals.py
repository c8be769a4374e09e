"""Leases held elsewhere, renewed by a thread of their own: no compile and no busy event loop lets one expire."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger(__name__)


class Grantor(Protocol):
    """Who granted a lease; both block."""

    def renew(self, lease: str, read: int) -> bool: ...

    def release(self, lease: str, read: int) -> object: ...


@dataclass
class _Held:
    grantor: Grantor
    every: float  # seconds
    read: Callable[[], int]  # blocks fetched so far
    due: float


class Renewals:
    """Renews every third of a lease's time, and lets go of it when told."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._releases = ThreadPoolExecutor(2, "release")
        self._thread = threading.Thread(target=self._run, name="renew", daemon=True)
        self._thread.start()

    def begin(self, grantor: Grantor, lease: str, seconds: float, read: Callable[[], int]) -> None:
        every = seconds / 3
        with self._changed:
            self._held[lease] = _Held(grantor, every, read, time.monotonic() + every)
            self._changed.notify()

    def end(self, grantor: Grantor, lease: str, read: int) -> None:
        """Let go, without waiting; the grantor's own timer does what a lost message does not."""
        with self._changed:
            self._held.pop(lease, None)
            if not self._closed:
                self._releases.submit(_quietly, grantor.release, lease, read)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._releases.shutdown()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                due = [(name, held) for name, held in self._held.items() if held.due <= now]
                if not due:
                    next_one = min((held.due for held in self._held.values()), default=now + 60)
                    self._changed.wait(next_one - now)
                    continue
                for _, held in due:
                    held.due = now + held.every
            for name, held in due:
                _quietly(held.grantor.renew, name, held.read())


def _quietly(call: Callable[[str, int], object], lease: str, read: int) -> None:
    try:
        call(lease, read)
    except Exception as why:
        log.warning("lease %s: %s", lease, why)
