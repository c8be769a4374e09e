"""What a cache announces and how it is followed: pages that can be found from now on, or no more, each with a number.

A router that knows which prompt beginnings a worker holds sends a prompt where most of it is computed already.
Whoever follows must notice what it missed: changes are numbered without gaps, and a mirror that finds one asks for
a snapshot. A page is announced by the first bytes of its name: a collision would cost time, never a wrong answer.
"""

import secrets
import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

SHORT = 8  # bytes


def short(key: bytes) -> bytes:
    """What a page is called in events."""
    return key[:SHORT]


class Change(NamedTuple):
    """A page that can be found from now on (`stored`), or no more."""

    stored: bool
    page: bytes  # its short name


class Events:
    """The changes of one or more caches that are asked as one, kept for followers; any thread may ask."""

    def __init__(self, keep: int = 65536):
        """`keep` is how many changes a follower may be behind before it needs a snapshot."""
        self.stream = secrets.token_hex(8)  # numbers of another stream mean nothing here
        self.number = 0  # of the last change
        self._holders: Counter[bytes] = Counter()  # caches that can find a page
        self._recent: deque[Change] = deque(maxlen=keep)
        self._lock = threading.Lock()

    def stored(self, key: bytes) -> None:
        """A cache can find the page `key` now."""
        with self._lock:
            page = short(key)
            self._holders[page] += 1
            if self._holders[page] == 1:
                self._note(Change(True, page))

    def removed(self, key: bytes) -> None:
        """A cache has forgotten the page `key`."""
        with self._lock:
            page = short(key)
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self._note(Change(False, page))

    def since(self, number: int) -> list[Change] | None:
        """The changes after `number`, in order; None if they are not kept any more or never were."""
        with self._lock:
            missed = self.number - number
            if not 0 <= missed <= len(self._recent):
                return None
            return list(islice(reversed(self._recent), missed))[::-1]

    def snapshot(self) -> tuple[int, list[bytes]]:
        """The number of the last change, and all pages that can be found after it."""
        with self._lock:
            return self.number, list(self._holders)

    def _note(self, change: Change) -> None:
        self.number += 1
        self._recent.append(change)


class Gap(Exception):
    """Changes are missing between what a mirror has and what it was told; only a snapshot helps."""


class Mirror:
    """What another's cache can find, as its events tell."""

    def __init__(self) -> None:
        self.stream, self.number = "", 0
        self.pages: set[bytes] = set()

    def restart(self, stream: str, number: int, pages: Iterable[bytes]) -> None:
        """Begin anew with a snapshot."""
        self.stream, self.number, self.pages = stream, number, set(pages)

    def follow(self, stream: str, after: int, changes: Sequence[Change]) -> None:
        """Take over the changes that come after number `after` of the stream; raises Gap, and changes nothing, if
        these are not the next ones."""
        if (stream, after) != (self.stream, self.number):
            raise Gap(
                f"change {after} of {stream!r} was announced, known is {self.number} of {self.stream!r}"
            )
        for stored, page in changes:
            if stored:
                self.pages.add(page)
            else:
                self.pages.discard(page)
        self.number += len(changes)

    def match(self, pages: Sequence[bytes]) -> int:
        """How many of a prompt's first pages can be found."""
        for i, page in enumerate(pages):
            if page not in self.pages:
                return i
        return len(pages)
