"""Leases: what somebody else may still read is kept until he lets go, or does not say in time that he is alive."""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class _Lease:
    expires: float
    on_end: Callable[[int], None]
    read: int = 0


class Leases:
    """Each lease ends once: released, or expired by a thread of its own, which waits for nothing else."""

    def __init__(self, seconds: float, on_expiry: Callable[[], None] = lambda: None):
        """`seconds` without a renewal end a lease; `on_expiry` is told of each that ended so."""
        self.seconds, self._on_expiry = seconds, on_expiry
        self._held: dict[str, _Lease] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._expire, name="leases", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._held)

    def grant(self, on_end: Callable[[int], None]) -> str:
        """A new lease. When it ends, `on_end` hears how many blocks, from the first, are known to have been read."""
        name = secrets.token_hex(8)
        with self._changed:
            self._held[name] = _Lease(time.monotonic() + self.seconds, on_end)
            self._changed.notify()
        return name

    def renew(self, name: str, read: int = 0) -> bool:
        """False when there is no such lease any more."""
        with self._changed:
            lease = self._held.get(name)
            if lease is None:
                return False
            lease.expires = time.monotonic() + self.seconds
            lease.read = max(lease.read, read)
            return True

    def release(self, name: str, read: int = 0) -> bool:
        """Let go; False when there is no such lease any more, which does no harm."""
        with self._changed:
            lease = self._held.pop(name, None)
        if lease is None:
            return False
        lease.on_end(max(lease.read, read))
        return True

    def close(self) -> None:
        """End all of them."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        for name in list(self._held):
            self.release(name)

    def _expire(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                late = [name for name, lease in self._held.items() if lease.expires <= now]
                ended = [self._held.pop(name) for name in late]
                if not ended:
                    next_one = min((lease.expires for lease in self._held.values()), default=now + 60)
                    self._changed.wait(next_one - now)
                    continue
            for lease in ended:
                self._on_expiry()
                lease.on_end(lease.read)
