"""Links over which blocks of cached rows reach another worker: JAX's transfer server, a byte stream, or this process.

The sender offers arrays and hands the ticket on by other means; who has the ticket fetches them, once. Nothing is
pushed: a receiver's memory is only ever written by itself, so a late sender can overwrite nothing.
"""

import itertools
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import transfer

POLL = 0.001  # seconds between two looks at whether an array has arrived
CHUNK = 1 << 20  # bytes sent or received at a time


class TransferError(Exception):
    """Blocks that did not arrive, arrived too late, or are not what was announced."""


class Link(Protocol):
    """A way for arrays between two workers; used from any thread."""

    address: str

    def offer(self, arrays: Sequence[jax.Array]) -> int:
        """A ticket for these arrays, each on one device; they are kept until fetched or withdrawn."""
        ...

    def withdraw(self, ticket: int) -> None:
        """Keep them no longer; they have not been fetched."""
        ...

    def forget(self, ticket: int) -> None:
        """They have been fetched."""
        ...

    def fetch(
        self, address: str, ticket: int, shapes: Sequence[jax.ShapeDtypeStruct], timeout: float
    ) -> list[Any]:
        """The arrays of a ticket; TransferError if they are not here after `timeout` seconds."""
        ...

    def close(self) -> None: ...


class JaxLink:
    """`jax.experimental.transfer`: from device memory to device memory over the data centre's network.

    A pull cannot be cancelled and some never end (of a ticket that is unknown, from a process that is stopped), so
    nobody waits in one: arrivals are polled, and given up after a time. An offer cannot be taken back either; what
    nobody fetched is pulled by its own sender, which frees it.
    """

    def __init__(self, host: str):
        self._device = jax.local_devices()[0]
        self._server = transfer.start_transfer_server(self._device.client, f"{host}:0", [f"{host}:0"])
        self.address = f"{host}:{self._server.address().rsplit(':', 1)[1]}"
        self._tickets = itertools.count(secrets.randbits(62))
        self._offered: dict[int, list[jax.ShapeDtypeStruct]] = {}
        self._connections: dict[str, Any] = {}
        self._lock = threading.Lock()

    def offer(self, arrays: Sequence[jax.Array]) -> int:
        ticket = next(self._tickets)
        self._offered[ticket] = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
        self._server.await_pull(ticket, list(arrays))
        return ticket

    def withdraw(self, ticket: int) -> None:
        if shapes := self._offered.pop(ticket, None):
            self._pull(self.address, ticket, shapes)

    def forget(self, ticket: int) -> None:
        self._offered.pop(ticket, None)

    def fetch(
        self, address: str, ticket: int, shapes: Sequence[jax.ShapeDtypeStruct], timeout: float
    ) -> list[Any]:
        deadline = time.monotonic() + timeout
        try:
            arrays = self._pull(address, ticket, shapes)
            while not all(array.is_ready() for array in arrays):  # pyright: ignore[reportAttributeAccessIssue]
                if time.monotonic() > deadline:
                    raise TransferError(f"{address} sent nothing for {timeout:g} s")
                time.sleep(POLL)
            return jax.block_until_ready(arrays)  # raises what went wrong on the way
        except (RuntimeError, ValueError) as why:
            with self._lock:
                self._connections.pop(address, None)
            raise TransferError(f"{address}: {why}") from why

    def close(self) -> None:
        for ticket in list(self._offered):
            self.withdraw(ticket)

    def _pull(self, address: str, ticket: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        here = jax.sharding.SingleDeviceSharding(self._device)
        wanted = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here) for s in shapes]
        with self._lock:
            if address not in self._connections:
                self._connections[address] = self._server.connect(address)
            return self._connections[address].pull(ticket, wanted)


class _Offers:
    """What this process keeps until it is fetched."""

    def __init__(self):
        # Tickets of an earlier process at the same address mean nothing here.
        self._tickets = itertools.count(secrets.randbits(62))
        self._offered: dict[int, Sequence[jax.Array]] = {}

    def offer(self, arrays: Sequence[jax.Array]) -> int:
        ticket = next(self._tickets)
        self._offered[ticket] = arrays
        return ticket

    def withdraw(self, ticket: int) -> None:
        self._offered.pop(ticket, None)

    forget = withdraw

    def close(self) -> None:
        self._offered.clear()


class ByteLink(_Offers):
    """A plain TCP stream by way of host memory: for networks and devices that JAX's transfer server cannot do."""

    def __init__(self, host: str):
        super().__init__()
        self._socket = socket.create_server((host, 0))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, name="byte link", daemon=True).start()

    def fetch(
        self, address: str, ticket: int, shapes: Sequence[jax.ShapeDtypeStruct], timeout: float
    ) -> list[Any]:
        deadline = time.monotonic() + timeout
        host, port = address.rsplit(":", 1)
        try:
            with socket.create_connection((host, int(port)), timeout) as peer:
                peer.sendall(struct.pack("<Q", ticket))
                arrays = [np.empty(shape.shape, shape.dtype) for shape in shapes]
                size = sum(array.nbytes for array in arrays)
                found = struct.unpack("<Q", _received(peer, 8, deadline))[0]
                if found != size:
                    raise TransferError(f"{address} has {found} bytes for this ticket, not {size}")
                for array in arrays:
                    _receive_into(peer, memoryview(array.reshape(-1).view(np.uint8)), deadline)
                return arrays
        except OSError as why:
            raise TransferError(f"{address}: {why}") from why

    def close(self) -> None:
        self._socket.close()
        super().close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._send, args=(peer,), name="byte link", daemon=True).start()

    def _send(self, peer: socket.socket) -> None:
        try:
            with peer:
                peer.settimeout(60)
                ticket = struct.unpack("<Q", _received(peer, 8, time.monotonic() + 60))[0]
                arrays = [np.asarray(array) for array in self._offered.get(ticket, ())]
                peer.sendall(struct.pack("<Q", sum(array.nbytes for array in arrays)))
                for array in arrays:
                    peer.sendall(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        except (OSError, TransferError):
            return  # the receiver has gone; the lease tells what becomes of the arrays


class DirectLink(_Offers):
    """Within one process, between groups of its devices: the arrays themselves."""

    address = "here"

    def fetch(
        self, address: str, ticket: int, shapes: Sequence[jax.ShapeDtypeStruct], timeout: float
    ) -> list[Any]:
        arrays = self._offered.get(ticket)
        if arrays is None:
            raise TransferError(f"there is no block {ticket} here any more")
        return list(arrays)


def _received(peer: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray(size)
    _receive_into(peer, memoryview(data), deadline)
    return bytes(data)


def _receive_into(peer: socket.socket, view: memoryview, deadline: float) -> None:
    while view:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TransferError("the link is too slow: the block did not arrive in time")
        peer.settimeout(left)
        count = peer.recv_into(view, min(len(view), CHUNK))
        if not count:
            raise TransferError("the sender closed the stream in the middle of a block")
        view = view[count:]
