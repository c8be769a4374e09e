"""Which workers there are: addresses given, in a file, or behind a name, looked at again and again."""

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from jaxserve.errors import ConfigError
from server.router.config import RouterConfig, check_url

log = logging.getLogger(__name__)
FILE_EVERY, NAME_EVERY = 1.0, 5.0  # seconds


class Addresses:
    """The workers' addresses as they are now; a source that cannot be read keeps those that it had."""

    def __init__(self, config: RouterConfig):
        self._config = config
        self._in_file: list[str] = []
        self._file_stamp: tuple[int, int] | None = None
        self._of_name: list[str] = []
        self._name_due = 0.0

    def read_file(self) -> None:
        """Read the file, if it changed; ConfigError if it cannot be read or a line is no address."""
        if self._config.workers_file is None:
            return
        path = Path(self._config.workers_file)
        try:
            stamp = (path.stat().st_mtime_ns, path.stat().st_size)
            if stamp == self._file_stamp:
                return
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"workers_file={str(path)!r} cannot be read: {error}") from None
        self._in_file = [check_url(line.strip()) for line in lines if line.strip() and line.strip()[0] != "#"]
        self._file_stamp = stamp

    async def resolve(self, now: float) -> None:
        """Ask for the addresses of the name, if that is due; OSError if it cannot be resolved."""
        if self._config.workers_dns is None or now < self._name_due:
            return
        self._name_due = now + NAME_EVERY
        parts = urlsplit(self._config.workers_dns)
        found = await asyncio.get_running_loop().getaddrinfo(
            parts.hostname, parts.port, type=socket.SOCK_STREAM
        )
        hosts = sorted({str(address[0]) for *_, address in found})
        self._of_name = [f"{parts.scheme}://{_in_url(host)}:{parts.port}" for host in hosts]

    @property
    def now(self) -> list[str]:
        """In order, each once."""
        given = [check_url(url) for url in self._config.workers]
        return list(dict.fromkeys([*given, *self._in_file, *self._of_name]))


async def keep_looking(addresses: Addresses, changed: Callable[[list[str]], None]) -> None:
    """Tell `changed` the addresses, now and whenever they are others, until cancelled."""
    told: list[str] | None = None
    complaint = ""
    while True:
        try:
            addresses.read_file()
            await addresses.resolve(asyncio.get_running_loop().time())
            complaint = ""
        except (ConfigError, OSError) as error:
            if str(error) != complaint:
                complaint = str(error)
                log.warning("the workers' addresses stay as they were: %s", complaint)
        if addresses.now != told:
            told = addresses.now
            changed(told)
        await asyncio.sleep(FILE_EVERY)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
