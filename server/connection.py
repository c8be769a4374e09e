"""Work that stops as soon as the client is gone."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


async def while_connected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and ClientGone raised, if the connection ends first.

    The request's body must have been read: what `receive` says next is that the client has gone.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
