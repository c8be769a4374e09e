"""POST /v1/completions."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from jaxserve.request import Delta
from jaxserve.request import Request as EngineRequest
from jaxserve.sampling.params import SamplingParams
from server.answers import Completion
from server.body import JsonRoute
from server.connection import while_connected
from server.errors import documented
from server.generation import Generation
from server.logprobs import LogprobsWriter
from server.params import completion_params
from server.prefill_url import prefill_url
from server.prompts import check_length, completion_prompts, tokens_text, truncated
from server.request_ids import engine_id, request_id
from server.schema import CompletionRequest
from server.served import Served, served
from server.stream import EVENTS, EventStream

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses={200: EVENTS, **documented(400, 401, 404, 413, 415, 429, 500, 503)},
)
async def completions(
    body: CompletionRequest, request: Request, served: Annotated[Served, Depends(served)]
) -> Response:
    """Go on from one or more prompts."""
    model = served.named(body.model)
    served.check_ready()
    params = completion_params(served, body)
    name = request_id(request, body.request_id)
    asked = await _requests(served, body, params, name, prefill_url(served, request))
    echoes = [await _echo(served, body, each) for each in asked] if body.echo else []
    generation = await Generation.start(served, asked)
    answer = CompletionAnswer(served, body, generation, echoes, f"cmpl-{name}", model)
    if body.stream:
        return EventStream(generation, answer.chunks(), served.config.sse_keep_alive_interval)
    async with generation:
        return JSONResponse(await while_connected(request.receive, answer.whole()))


async def _requests(
    served: Served, body: CompletionRequest, params: SamplingParams, name: str, prefill: str | None
) -> list[EngineRequest]:
    requests = []
    for ids, text in await completion_prompts(served, body):
        kept = truncated(served, ids, params.truncate_prompt_tokens, params.max_tokens)
        check_length(served, kept, params.max_tokens, messages=False)
        text = text if len(kept) == len(ids) else None
        requests.append(
            EngineRequest(
                engine_id(name),
                kept,
                params,
                text,
                body.priority or 0,
                body.cache_salt or "",
                generated=body.generated_token_ids or [],
                prefill_url=prefill,
                trace_id=name,
            )
        )
    return requests


async def _echo(served: Served, body: CompletionRequest, request: EngineRequest) -> str:
    if request.prompt is not None:
        return request.prompt
    return await tokens_text(served, request.prompt_token_ids, body.skip_special_tokens is not False)


@dataclass
class CompletionAnswer:
    """Writes one generation as a completion, whole or in chunks; both come from the same deltas."""

    served: Served
    body: CompletionRequest
    generation: Generation
    echoes: list[str]  # each prompt's text, if it is to be given back
    id: str
    model: str

    def __post_init__(self):
        self._logprobs = LogprobsWriter(
            self.served.engine.tokenizer, self.body.logprobs or 0, bool(self.body.return_tokens_as_token_ids)
        )
        self._created = int(time.time())
        self._offsets: dict[int, int] = {}

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        choices = await self.generation.choices(self._deltas())
        written = [self._choice(choice, first=True) for choice in choices]
        return self._head() | {"choices": written, "usage": self.generation.usage()}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in pieces; each choice's last one names the reason it ended."""
        options = self.body.stream_options
        usage = bool(options and options.include_usage)
        so_far = bool(options and options.continuous_usage_stats)
        begun: set[int] = set()
        head = self._head()
        async for delta in self._deltas():
            if not (delta.text or delta.finish_reason or self._shows_tokens(delta)):
                continue
            chunk = head | {"choices": [self._choice(delta, first=delta.index not in begun)]}
            begun.add(delta.index)
            if usage:
                chunk["usage"] = self.generation.usage() if so_far else None
            yield chunk
        if usage:
            yield head | {"choices": [], "usage": self.generation.usage()}

    async def _deltas(self) -> AsyncIterator[Delta]:
        """The engine's deltas, the prompt put before each choice's first if it is to be echoed."""
        begun: set[int] = set()
        async for delta in self.generation.deltas():
            yield self._with_prompt(delta) if self.body.echo and delta.index not in begun else delta
            begun.add(delta.index)

    def _with_prompt(self, delta: Delta) -> Delta:
        prompt = self._prompt(delta.index)
        ids = self.generation.requests[prompt].prompt_token_ids
        scored: Any = (
            delta.prompt_logprobs
        )  # None for the first token, which a Delta's own logprobs never have
        return replace(
            delta,
            text=self.echoes[prompt] + delta.text,
            token_ids=ids + delta.token_ids,
            logprobs=(scored or []) + (delta.logprobs or []),
        )

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self.model,
            "system_fingerprint": self.served.fingerprint,
        }

    def _choice(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": delta.index, "text": delta.text, "logprobs": None}
        if self.body.logprobs is not None:
            offset = self._offsets.get(delta.index, 0)
            choice["logprobs"], self._offsets[delta.index] = self._logprobs.completion(
                delta.token_ids, delta.logprobs or [], offset
            )
        choice["finish_reason"], choice["stop_reason"] = delta.finish_reason, delta.stop_reason
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = self.generation.requests[
                    self._prompt(delta.index)
                ].prompt_token_ids
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._logprobs.prompt(delta.prompt_logprobs or [])
        return choice

    def _prompt(self, index: int) -> int:
        """Which prompt this choice is of."""
        return index // self.generation.requests[0].params.n

    def _shows_tokens(self, delta: Delta) -> bool:
        return bool(delta.token_ids) and (self.body.logprobs is not None or bool(self.body.return_token_ids))
