"""Worker processes as a user would start them, for tests that kill, stop and restart them."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]


class Worker:
    """`jaxserve serve MODEL` on a port of its own."""

    def __init__(self, model: str, cache: str, port: int | None = None, devices: int = 1, **flags: Any):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        listed: list[str] = []
        for name, value in {
            "port": self.port,
            "host": "127.0.0.1",
            "compilation_cache_dir": cache,
            **flags,
        }.items():
            values = value if isinstance(value, tuple | list) else (value,)
            listed += [f"--{name.replace('_', '-')}", *(str(v) for v in values)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        self._said: str | None = None  # all that it wrote, once it has ended
        self._log = tempfile.TemporaryFile("a+")  # noqa: SIM115 -- a pipe that nobody reads fills up and stops it
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "server.cli", "serve", model, *listed],
            cwd=ROOT, env=environment, stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def ready(self) -> "Worker":
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            try:
                if httpx.get(self.url + "/readyz").status_code == 200:
                    return self
            except httpx.TransportError:
                assert self.popen.poll() is None, self.said()
            time.sleep(0.05)
        raise AssertionError("never ready")

    def load(self) -> dict[str, Any]:
        return httpx.get(self.url + "/internal/load").json()

    def metric(self, name: str, **labels: str) -> float:
        """The value of a sample; its labels must include these."""
        for line in httpx.get(self.url + "/metrics").text.splitlines():
            if line.startswith(name) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no {name} {labels}")

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill(self) -> str:
        """End it at once; what it wrote."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.kill()
        self.popen.wait()
        if self._said is None:
            self._said = self.said()
            self._log.close()
        return self._said

    def said(self) -> str:
        """What it wrote so far."""
        self._log.seek(0)
        return self._log.read()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def conserved(worker: Worker, seconds: float = 20.0) -> None:
    """Soon nothing is held: every page is free or cached, and no lease is left."""
    deadline = time.monotonic() + seconds
    while True:
        load = worker.load()
        pages = load["pages"]
        assert pages["free"] + pages["used"] + pages["cached"] == pages["total"]
        if pages["used"] == 0 and load["leases"] == 0 and load["running"] == load["waiting"] == 0:
            return
        assert time.monotonic() < deadline, load
        time.sleep(0.05)
