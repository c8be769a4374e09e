"""POST /v1/chat/completions."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from jaxserve.request import Delta
from jaxserve.request import Request as EngineRequest
from server.answers import ChatCompletion
from server.body import JsonRoute
from server.connection import while_connected
from server.errors import documented
from server.generation import Generation
from server.logprobs import LogprobsWriter
from server.params import chat_params
from server.prefill_url import prefill_url
from server.prompts import chat_tokens, check_length, truncated
from server.request_ids import engine_id, request_id
from server.schema import ChatRequest
from server.served import Served, served
from server.stream import EVENTS, EventStream

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses={200: EVENTS, **documented(400, 401, 404, 413, 415, 429, 500, 503)},
)
async def chat_completions(
    body: ChatRequest, request: Request, served: Annotated[Served, Depends(served)]
) -> Response:
    """Go on from a conversation."""
    model = served.named(body.model)
    served.check_ready()
    params = chat_params(served, body)
    ids, text = await chat_tokens(served, body)
    ids = truncated(served, ids, params.truncate_prompt_tokens, params.max_tokens)
    check_length(served, ids, params.max_tokens, messages=True)
    name = request_id(request, body.request_id)
    asked = EngineRequest(
        engine_id(name),
        ids,
        params,
        text,
        body.priority or 0,
        body.cache_salt or "",
        generated=body.generated_token_ids or [],
        prefill_url=prefill_url(served, request),
        trace_id=name,
    )
    generation = await Generation.start(served, [asked])
    answer = ChatAnswer(served, body, generation, f"chatcmpl-{name}", model)
    if body.stream:
        return EventStream(generation, answer.chunks(), served.config.sse_keep_alive_interval)
    async with generation:
        return JSONResponse(await while_connected(request.receive, answer.whole()))


@dataclass
class ChatAnswer:
    """Writes one generation as a chat completion, whole or in chunks; both come from the same deltas."""

    served: Served
    body: ChatRequest
    generation: Generation
    id: str
    model: str

    def __post_init__(self):
        self._logprobs = LogprobsWriter(
            self.served.engine.tokenizer,
            self.body.top_logprobs or 0,
            bool(self.body.return_tokens_as_token_ids),
        )
        self._created = int(time.time())

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        choices = await self.generation.choices(self.generation.deltas())
        answer = self._head("chat.completion") | {
            "choices": [
                self._choice(
                    choice, "message", {"role": "assistant", "content": choice.text, "refusal": None}
                )
                for choice in choices
            ],
            "usage": self.generation.usage(),
        }
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = self._prompt_ids()
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._logprobs.prompt(choices[0].prompt_logprobs or [])
        return answer

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in pieces: each choice's first names the role and its last the reason it ended."""
        options = self.body.stream_options
        usage = bool(options and options.include_usage)
        so_far = bool(options and options.continuous_usage_stats)
        begun: set[int] = set()
        head = self._head("chat.completion.chunk")
        async for delta in self.generation.deltas():
            first = delta.index not in begun
            if not (first or delta.text or delta.finish_reason or self._shows_tokens(delta)):
                continue
            begun.add(delta.index)
            content: dict[str, Any] = (
                {"role": "assistant", "content": delta.text} if first else {"content": delta.text}
            )
            chunk = head | {"choices": [self._choice(delta, "delta", content)]}
            if usage:
                chunk["usage"] = self.generation.usage() if so_far else None
            if first and self.body.return_token_ids:
                chunk["prompt_token_ids"] = self._prompt_ids()
            yield chunk
        if usage:
            yield head | {"choices": [], "usage": self.generation.usage()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self.model,
            "system_fingerprint": self.served.fingerprint,
        }

    def _choice(self, delta: Delta, key: str, said: dict[str, Any]) -> dict[str, Any]:
        choice = {
            "index": delta.index,
            key: said,
            "logprobs": self._logprobs.chat(delta.token_ids, delta.logprobs or [])
            if self.body.logprobs
            else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason or key == "message":
            choice["stop_reason"] = delta.stop_reason
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _shows_tokens(self, delta: Delta) -> bool:
        return bool(delta.token_ids) and bool(self.body.logprobs or self.body.return_token_ids)

    def _prompt_ids(self) -> list[int]:
        return self.generation.requests[0].prompt_token_ids
