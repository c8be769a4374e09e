"""API keys: every route but the health checks wants one, when the server has any."""

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError, error_response

OPEN = frozenset({"/health", "/livez", "/readyz"})


class ApiKeys:
    """Lets through whoever shows one of `keys`, as `Authorization: Bearer KEY` or `x-api-key: KEY`."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]):
        self.app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] == "lifespan" or path in OPEN or self._knows(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        message = "the API key is missing or wrong; send Authorization: Bearer KEY, or x-api-key: KEY"
        refusal = error_response(ApiError(401, message, headers={"WWW-Authenticate": "Bearer"}))
        await refusal(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        shown = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(shown)
        # All are compared, each in constant time, so the time taken tells nothing about the keys.
        return sum([hmac.compare_digest(digest, known) for known in self._digests]) > 0


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
