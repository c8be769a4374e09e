"""What a request is answered that the server leaves unfinished because it was told to stop at once."""

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, error_body, error_response
from server.request_ids import HEADER
from server.stream import event

STOPPED = "the server was told to stop before this request was finished; send it again to another one"


class Stopping:
    """Around everything: a request whose task is cancelled ends with an error body, or a stream with an error event.

    Cancelled are those that are left at a second signal, or when the time to finish is over.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun: list[Message] = []  # the start of the answer, and its end

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start" or not message.get("more_body", False):
                begun.append(message)
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except asyncio.CancelledError:
            if scope["type"] != "http" or len(begun) > 1:
                raise
            stopped = ApiError(503, STOPPED, headers={"Retry-After": "5"})
            if not begun:
                answer = error_response(stopped)
                answer.headers[HEADER] = scope["state"]["request_id"]
                await answer(scope, receive, send)
            elif Headers(raw=begun[0]["headers"]).get("content-type", "").startswith("text/event-stream"):
                body = event(error_body(stopped))
                await send({"type": "http.response.body", "body": body, "more_body": False})
            else:
                raise
