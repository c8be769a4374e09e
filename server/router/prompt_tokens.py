"""The tokens of a request's prompt, which tell the workers that have its beginning in their caches."""

import struct
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import httpx
from pydantic import ValidationError

from jaxserve.errors import JaxserveError
from jaxserve.text import load_tokenizer
from kv.events import short
from kv.hashing import extend_keys
from server.config import ServerConfig
from server.prompts import chat_tokens, completion_prompts
from server.schema import ChatRequest, CompletionRequest
from server.served import Served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_CHAT_FIELDS = (
    "messages", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
)  # fmt: skip


class PromptTokens(Protocol):
    """Who turns a body into tokens."""

    async def __call__(self, path: str, body: dict[str, Any]) -> list[int] | None:
        """The tokens of the (first) prompt; None if they cannot be told, which costs a good choice only."""
        ...


class Tokenized:
    """With a tokenizer in this process, by the code that the workers use."""

    def __init__(self, model: str, config: ServerConfig):
        engine = SimpleNamespace(tokenizer=load_tokenizer(model))
        self._served = Served(engine, config, config.template_text())

    async def __call__(self, path: str, body: dict[str, Any]) -> list[int] | None:
        try:
            if path == CHAT:
                return (await chat_tokens(self._served, ChatRequest.model_validate(body)))[0]
            if path == COMPLETIONS:
                return (await completion_prompts(self._served, CompletionRequest.model_validate(body)))[0][0]
        except (JaxserveError, ValidationError):
            pass  # the worker will say what is wrong with it
        return None


class Asked:
    """By a worker's /tokenize."""

    def __init__(self, post: Any):
        """`post(path, body)` gives a worker's answer, or None."""
        self._post = post

    async def __call__(self, path: str, body: dict[str, Any]) -> list[int] | None:
        prompt = body.get("prompt")
        if path == COMPLETIONS and isinstance(prompt, list) and prompt:
            first = prompt[0] if isinstance(prompt[0], list) else prompt
            if all(type(token) is int for token in first):
                return first
            prompt = prompt[0]
        if path == COMPLETIONS and isinstance(prompt, str):
            asked = {"prompt": prompt, "add_special_tokens": body.get("add_special_tokens")}
        elif path == CHAT and "messages" in body:
            asked = {name: body[name] for name in _CHAT_FIELDS if name in body}
        else:
            return None
        answer: httpx.Response | None = await self._post("/tokenize", asked)
        return answer.json()["tokens"] if answer is not None and answer.status_code == 200 else None


def page_names(tokens: Sequence[int], page_size: int, salt: str) -> list[bytes]:
    """Short names of the full pages that a prompt can share, as `KVCache.match` looks for them."""
    keys: list[bytes] = []
    try:
        extend_keys(keys, list(tokens), (len(tokens) - 1) // page_size, page_size, salt)
    except struct.error:  # numbers that are no tokens: the worker will say so
        return []
    return [short(key) for key in keys]
