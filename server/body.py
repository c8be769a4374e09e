"""Request bodies: JSON of bounded size and depth, in UTF-8, without NaN; anything else is refused."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from server.errors import ApiError


class JsonRoute(APIRoute):
    """A route that reads its body with `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await answer(JsonRequest(request.scope, request.receive))

        return strict


class JsonRequest(Request):
    """A request whose body is at most `app.state.served.config.max_body_bytes` of strict JSON."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            self._body = await self._read(self.app.state.served.config.max_body_bytes)
            if self._body:
                self._check_type()
        return self._body

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as why:
            half = "half of a surrogate pair, which is no character: " if "hex escape" in str(why) else ""
            raise ApiError(400, f"the body is not valid JSON: {half}{why}", code="invalid_json") from why

    def _check_type(self) -> None:
        kind = self.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(
                415,
                f"the body's type is {kind or 'not given'}; send JSON with Content-Type: application/json",
            )

    async def _read(self, limit: int) -> bytes:
        announced = self.headers.get("content-length", "")
        if announced.isdigit() and len(announced) < 20 and int(announced) > limit:
            raise _too_large(limit)
        parts, size = [], 0
        async for part in self.stream():
            parts.append(part)
            size += len(part)
            if size > limit:
                raise _too_large(limit)
        return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"the body is larger than {limit} bytes, the server's max_body_bytes; send less at a time"
    )
