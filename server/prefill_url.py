"""The header with which a router names the worker that is to compute a prompt for the one that is asked."""

from fastapi import Request

from server.errors import ApiError
from server.roles import is_address
from server.served import Served

HEADER = "X-Jaxserve-Prefill"


def prefill_url(served: Served, request: Request) -> str | None:
    """The address in the header; ApiError where nothing can come of it."""
    url = request.headers.get(HEADER)
    if url is None:
        return None
    if getattr(served.engine, "role", None) is None:
        raise ApiError(
            400, f"{HEADER} has no effect here: this server was started without --role", param=HEADER
        )
    if not is_address(url):
        raise ApiError(400, f"{HEADER}: {url[:128]!r} is no address; write http://HOST:PORT", param=HEADER)
    return url
