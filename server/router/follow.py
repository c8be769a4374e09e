"""Following a worker: one stream tells its load, its pace, its pages and, by going on, that it is alive."""

import asyncio
import json
import logging
from typing import Any

import httpx

from kv.events import Change, Gap
from server.router.worker import Worker

log = logging.getLogger(__name__)
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds between two attempts to reach a worker


async def follow(
    worker: Worker, client: httpx.AsyncClient, headers: dict[str, str], lost_after: float
) -> None:
    """Keep `worker` as it is now, until cancelled.

    It is lost when nothing is heard of it for `lost_after` seconds, or when its stream breaks off for good.
    """
    pause, heard = FIRST_PAUSE, False
    while True:
        why = "it ended the stream of its events twice"
        silent = False
        try:
            async for line in _lines(worker, client, headers, lost_after):
                take(worker, line)
                pause, heard = FIRST_PAUSE, True
        except Gap as gap:
            log.warning("%s: %s; asking for a snapshot", worker.url, gap)
            worker.resyncs += 1
            worker.mirror.restart("", 0, ())
        except Exception as error:  # whatever it is: who is not understood is as good as gone
            silent = isinstance(error, httpx.ReadTimeout)
            why = (
                f"nothing was heard of it for {lost_after:g} s"
                if silent
                else str(error) or type(error).__name__
            )
        if silent or not heard:
            if worker.state != "unreachable":
                log.warning("%s is lost: %s", worker.url, why)
            worker.lose(why)
        heard = False
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


async def _lines(worker: Worker, client: httpx.AsyncClient, headers: dict[str, str], lost_after: float):
    """What the worker says, a line at a time; TimeoutError when it is silent."""
    known = {"stream": worker.mirror.stream, "after": worker.mirror.number}
    timeout = httpx.Timeout(lost_after)
    async with client.stream(
        "GET", worker.url + "/internal/events", params=known, headers=headers, timeout=timeout
    ) as response:
        if response.is_error:
            raise httpx.HTTPError(f"/internal/events is answered {response.status_code}")
        async for line in response.aiter_lines():
            yield json.loads(line)


def take(worker: Worker, line: dict[str, Any]) -> None:
    """Take over one line of the stream; raises Gap if changes of pages are missing before it."""
    for kind, said in line.items():
        if kind == "worker":
            worker.about = said
        elif kind == "load":
            worker.load, worker.state, worker.why = said, said["state"], ""
        elif kind == "snapshot":
            worker.mirror.restart(said["stream"], said["number"], map(bytes.fromhex, said["pages"]))
        elif kind == "changes":
            changes = [Change(page[0] == "+", bytes.fromhex(page[1:])) for page in said["pages"]]
            worker.mirror.follow(said["stream"], said["after"], changes)
