"""Request ids: every answer carries X-Request-Id, the caller's own if it sent a usable one."""

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
PATTERN = r"^[\x21-\x7e]{1,128}$"


class RequestIds:
    """Gives each HTTP request an id, in `scope["state"]`, and its answer the header."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sent = Headers(scope=scope).get(HEADER, "")
        state = scope.setdefault("state", {})
        state["sent_request_id"] = sent if re.fullmatch(PATTERN, sent) else None
        state["request_id"] = state["sent_request_id"] or uuid.uuid4().hex

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = state["request_id"]
            await send(message)

        await self.app(scope, receive, with_id)


def request_id(request: Request, in_body: str | None = None) -> str:
    """The id of this request: from the header, else from the body's field, else a new one."""
    if in_body and not request.state.sent_request_id:
        request.state.request_id = in_body
    return request.state.request_id


def engine_id(name: str) -> str:
    """An id for the engine, unique even if callers repeat theirs."""
    return f"{name}-{uuid.uuid4().hex[:12]}"
