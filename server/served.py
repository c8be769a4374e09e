"""What the server serves: the engine under its names, and the checks that every route makes first."""

import hashlib
import time
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from typing import Any

from starlette.requests import Request

from jaxserve.errors import OverloadedError, RequestError
from jaxserve.text import Tokenizer
from server.config import ServerConfig

VERSION = version("jaxserve")
RETRY = 5.0  # seconds


@dataclass(frozen=True)
class Served:
    """An engine (an AsyncLLM, or anything with its `submit`, `health`, `tokenizer` and `config`) and its settings."""

    engine: Any
    config: ServerConfig
    chat_template: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The engine's, with the chat template that whoever runs the server gave."""
        tokenizer = self.engine.tokenizer
        return tokenizer.with_chat_template(self.chat_template) if self.chat_template else tokenizer

    @property
    def names(self) -> tuple[str, ...]:
        """The names it answers to; the first is the one it gives itself."""
        return self.config.served_model_name or (self.engine.config.model,)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.engine.config.max_model_len

    @property
    def fingerprint(self) -> str:
        """Changes when the release, the model or the numerics do."""
        config = self.engine.config
        parts = (config.model, config.revision, config.dtype, config.kv_cache_dtype)
        return f"jaxserve-{VERSION}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:8]}"

    def named(self, model: str | None) -> str:
        """The name to answer with; a RequestError if it is not one of ours."""
        if model is None:
            return self.names[0]
        if model not in self.names:
            raise RequestError(
                f"the model {model[:256]!r} does not exist here; there is {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return model

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, and let running ones finish for up to `timeout` seconds."""
        if self.engine.health().state != "starting":
            await self.engine.drain(timeout)

    def check_ready(self) -> None:
        """Refuse while the engine cannot take requests."""
        self.check_loaded()
        state = self.engine.health().state
        if state != "ready":
            raise OverloadedError(
                f"the server takes no requests now: it is {state}", retry_after=RETRY, draining=True
            )

    def check_loaded(self) -> None:
        """Refuse while there is no model yet to ask about."""
        if self.engine.health().state == "starting":
            raise OverloadedError(
                "the server is still starting; try again soon", retry_after=RETRY, draining=True
            )


async def served(request: Request) -> Served:
    """What this request's app serves (a FastAPI dependency)."""
    return request.app.state.served
