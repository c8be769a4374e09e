"""What workers say to each other: handshakes, prompts that are handed over, and leases on their pages."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse, StreamingResponse

from jaxserve.errors import RequestError
from jaxserve.handover.handshake import Handshake
from jaxserve.handover.messages import Incompatible, Message
from jaxserve.request import Request as EngineRequest
from server.body import JsonRoute
from server.clients.messages import message_json, request_from
from server.clients.split import Split
from server.errors import ApiError, as_api_error, error_body
from server.roles import ROLES
from server.served import Served, served

BEAT = 1.0  # seconds of silence after which a stream says that it is alive
router = APIRouter(route_class=JsonRoute, include_in_schema=False)


class Prefill(BaseModel):
    model_config = ConfigDict(extra="forbid")
    request: dict[str, Any]
    receiver: dict[str, Any]
    skip: int
    link: str


class Role(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: str


async def split(served: Annotated[Served, Depends(served)]) -> Split:
    """This worker's engine, if it has a role."""
    served.check_loaded()
    if not isinstance(served.engine, Split):
        raise ApiError(404, "this server hands nothing over; start it with --role", code="no_role")
    return served.engine


Engine = Annotated[Split, Depends(split)]


@router.get("/internal/handshake")
async def handshake(engine: Engine) -> JSONResponse:
    """What this worker is."""
    return JSONResponse(engine.handshake.written())


@router.get("/internal/load")
async def load(engine: Engine) -> JSONResponse:
    """How much there is to do, and where the pages are."""
    now, health = engine.load(), engine.health()
    waiting = {"running": now.running, "waiting": now.waiting, "waiting_tokens": now.waiting_tokens}
    pages = engine.pages.counts()
    held = {"leases": len(engine.sender.leases)}
    return JSONResponse({"state": health.state, "role": engine.role, **waiting, "pages": pages, **held})


@router.post("/internal/role")
async def change_role(body: Role, engine: Engine) -> JSONResponse:
    """What this worker is for from now on; what runs goes on."""
    if body.role not in ROLES:
        raise ApiError(
            400, f"role {body.role[:64]!r} is unknown; use one of {', '.join(ROLES)}", param="role"
        )
    engine.role = body.role
    return JSONResponse(engine.handshake.written())


@router.post("/internal/prefill")
async def prefill(body: Prefill, engine: Engine) -> StreamingResponse:
    """Compute a prompt and hand it over, as a stream of lines."""
    try:
        request = request_from(body.request)
        receiver = Handshake.read(body.receiver)
        receiver.link_to(engine.handshake, body.link)
        length, page = len(request.prompt_token_ids), int(receiver.page_size)
    except Incompatible as why:
        raise ApiError(409, str(why), code="incompatible") from why
    except (KeyError, TypeError, ValueError, AttributeError) as why:
        raise RequestError(f"request or receiver: {why}", param="request") from why
    if body.link not in engine.handshake.transfer:
        offered = ", ".join(engine.handshake.transfer)
        raise RequestError(f"link {body.link[:64]!r} is not offered here; use one of {offered}", param="link")
    if not 0 <= body.skip <= length or page < 1:
        raise RequestError(
            f"skip must be from 0 to the prompt's {length} tokens, and the receiver's page_size at least 1",
            param="skip",
        )
    request = engine.llm.check(request)
    lines = _lines(engine, request, receiver, body)
    return StreamingResponse(lines, media_type="application/x-ndjson")


@router.post("/internal/leases/{lease}/renew")
async def renew(lease: str, engine: Engine, read: int = 0) -> JSONResponse:
    """Keep its blocks on; `read` of them have been fetched."""
    return _found(engine.sender.renew(lease, read))


@router.delete("/internal/leases/{lease}")
async def release(lease: str, engine: Engine, read: int = 0) -> JSONResponse:
    """Its blocks are not wanted any more; `read` of them have been fetched."""
    return _found(engine.sender.release(lease, read))


def _found(there: bool) -> JSONResponse:
    if not there:
        raise ApiError(404, "there is no such lease any more; it ended or expired", code="no_lease")
    return JSONResponse({})


async def _lines(
    engine: Split, request: EngineRequest, receiver: Handshake, body: Prefill
) -> AsyncIterator[str]:
    messages = engine.sender.prefill(request, receiver, body.skip, body.link)
    said: asyncio.Queue[Message | Exception | None] = asyncio.Queue()
    listening = asyncio.create_task(_listen(messages, said))
    beats = 0
    try:
        while True:
            try:
                message = await asyncio.wait_for(said.get(), BEAT)
            except TimeoutError:
                health = engine.health()
                if health.state in ("stalled", "dead"):
                    yield _line(error_body(ApiError(503, f"the engine is {health.state}: {health.detail}")))
                    return
                beats += 1
                yield _line({"beat": beats})
                continue
            if message is None:
                return
            if isinstance(message, Exception):
                yield _line(error_body(as_api_error(message)))
                return
            yield _line(message_json(message))
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def _listen(messages: Any, said: asyncio.Queue) -> None:
    try:
        async with aclosing(messages):
            async for message in messages:
                said.put_nowait(message)
        said.put_nowait(None)
    except Exception as failure:
        said.put_nowait(failure)


def _line(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":")) + "\n"
