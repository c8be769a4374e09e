"""Several processes as one engine: how they find each other, how the first tells the others what to do, who is lost.

The first process (the leader) decides on every step and sends it; the others (followers) run the same programs in the
same order. Between them is one TCP connection each, which also tells a process that has died from a slow one.
"""

import contextlib
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

log = logging.getLogger(__name__)
HEARTBEAT = 1.0  # seconds between two signs of life
SILENCE = 20.0  # seconds without one after which a process is lost though its connection stands
LEAVING = 60.0  # seconds that an ending leader waits for its followers: JAX aborts those it leaves behind
_HEADER = struct.Struct("!BQ")  # kind of a frame, length of what follows
_ALIVE = 0  # kinds from 1 on are the callers'


class Lost(Exception):
    """A process of the engine has gone, or has refused to take part; the message says which and why."""


class Leader:
    """The leader's end: waits for all followers, then sends frames to all of them.

    `on_lost(why)` is called once, from a thread of ours, when a follower has gone: the thread that waits for a
    result to which that one should have contributed may wait for ever.
    """

    def __init__(self, address: str, port: int, followers: int, terms: dict[str, Any], timeout: float):
        """`terms` are what all must agree on; Lost names the first that a follower sees differently."""
        self.on_lost: Callable[[str], None] = give_up
        self._closing = False
        self._lock = threading.Lock()
        self._peers: dict[int, socket.socket] = {}
        try:
            self._gather(address, port, followers, terms, timeout)
        except BaseException:
            for peer in self._peers.values():
                peer.close()
            raise
        self._watches = [
            threading.Thread(target=self._watch, args=each, name=f"follower {each[0]}", daemon=True)
            for each in self._peers.items()
        ]
        for watch in self._watches:
            watch.start()

    def send(self, kind: int, *parts: bytes) -> None:
        """One frame to every follower."""
        with self._lock:
            for rank, peer in self._peers.items():
                try:
                    _send(peer, kind, b"".join(parts))
                except OSError as why:
                    raise Lost(f"process {rank} has gone: {why}") from why

    def stop(self, kind: int) -> None:
        """A last frame to whoever is still there; returns when they have left."""
        deadline = time.monotonic() + LEAVING
        with self._lock:
            gone, self._closing = self._closing, True
            for peer in self._peers.values():
                with contextlib.suppress(OSError):
                    _send(peer, kind, b"")
                if gone:
                    peer.close()
        for watch in [] if gone else self._watches:
            watch.join(max(deadline - time.monotonic(), 0))

    def _gather(self, address: str, port: int, followers: int, terms: dict[str, Any], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with socket.create_server((address, port), backlog=followers) as server:
            while len(self._peers) < followers:
                server.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    peer, _ = server.accept()
                except TimeoutError:
                    raise Lost(
                        f"{len(self._peers)} of {followers} followers came to {address}:{port} within {timeout:.0f} s; "
                        f"here are ranks {sorted(self._peers)}"
                    ) from None
                problem = self._greet(peer, terms)
                if problem:
                    peer.close()
                    raise Lost(problem)

    def _greet(self, peer: socket.socket, terms: dict[str, Any]) -> str:
        """What is wrong with a process that has come, if anything; it is told, too."""
        peer.settimeout(SILENCE)
        hello = json.loads(_receive(peer)[1])
        rank, theirs = hello["rank"], hello["terms"]
        differ = [name for name in terms if terms[name] != theirs.get(name)]
        problem = f"two processes have rank {rank}" if rank in self._peers else ""
        if differ:
            problem = (
                f"process {rank} was started with {differ[0]}={theirs.get(differ[0])!r}, and the leader with "
                f"{terms[differ[0]]!r}; start all with the same settings"
            )
        _send(peer, 1, problem.encode())
        if not problem:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peers[rank] = peer
        return problem

    def _watch(self, rank: int, peer: socket.socket) -> None:
        with peer:
            try:
                while True:
                    _receive(peer)
            except (OSError, EOFError) as why:
                if self._closing:
                    return
                self._closing = True
                silent = isinstance(why, TimeoutError)
            reason = f"gave no sign of life for {SILENCE:.0f} s" if silent else "has gone"
            self.on_lost(f"process {rank} of the engine {reason}; restart all of them")
            self.stop(kind=_ALIVE)  # the others find the connection closed, and end


class Follower:
    """A follower's end. A leader that has gone ends the process, as no collective of theirs will."""

    def __init__(self, address: str, port: int, rank: int, terms: dict[str, Any], timeout: float):
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._peer = socket.create_connection((address, port), timeout=SILENCE)
                break
            except OSError as why:
                if time.monotonic() > deadline:
                    raise Lost(f"no leader at {address}:{port} within {timeout:.0f} s: {why}") from why
                time.sleep(0.2)
        self._closing = False
        _send(self._peer, 1, json.dumps({"rank": rank, "terms": terms}).encode())
        problem = _receive(self._peer)[1].decode()
        if problem:
            self._peer.close()
            raise Lost(problem)
        self._peer.settimeout(None)
        threading.Thread(target=self._live, name="heartbeat", daemon=True).start()

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """What the leader sends; Lost when it dies."""
        while True:
            try:
                frame = _receive(self._peer)
            except (OSError, EOFError) as why:
                raise Lost("the leader has gone; restart all processes of the engine") from why
            if frame[0] != _ALIVE:
                yield frame

    def close(self) -> None:
        """Leave JAX's group while the leader, who keeps it, still waits; then the leader."""
        self._closing = True
        jax.distributed.shutdown()
        self._peer.close()

    def _live(self) -> None:
        while True:
            try:
                _send(self._peer, _ALIVE, b"")
            except OSError:
                if not self._closing:
                    give_up("the leader has gone; restart all processes of the engine")
                return
            time.sleep(HEARTBEAT)


def give_up(why: str) -> None:
    """End this process at once: whatever waits in a collective cannot be woken."""
    log.critical(why)
    logging.shutdown()
    os._exit(1)


def join(address: str, port: int, processes: int, rank: int, timeout: float) -> None:
    """Make JAX see the devices of all processes; the leader listens on `port`.

    A process that dies does not take the others with it: that is for `on_lost` to decide.
    """
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update(
        "jax_enable_preemption_service", False
    )  # it would take SIGTERM from whom it is meant for
    jax.distributed.initialize(f"{address}:{port}", processes, rank, initialization_timeout=int(timeout))


def least(number: int) -> int:
    """The smallest that any process has."""
    return int(np.min(multihost_utils.process_allgather(np.array(number))))


def _send(peer: socket.socket, kind: int, body: bytes) -> None:
    peer.sendall(_HEADER.pack(kind, len(body)) + body)


def _receive(peer: socket.socket) -> tuple[int, bytes]:
    kind, length = _HEADER.unpack(_exactly(peer, _HEADER.size))
    return kind, _exactly(peer, length)


def _exactly(peer: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = peer.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError("the connection has ended")
        parts += part
    return bytes(parts)
