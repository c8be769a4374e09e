"""A running server as the thing measured: /v1/completions, streamed."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from bench.load import Piece
from bench.workloads import Work
from jaxserve.errors import ConfigError


class ServerTarget:
    """Any server with OpenAI's completions; `extra` goes into every body, where None takes a field out of it."""

    def __init__(self, base_url: str, model: str | None, api_key: str | None, extra: dict[str, Any] | None):
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.client = httpx.AsyncClient(
            base_url=base_url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=httpx.Timeout(None, connect=10),
            limits=httpx.Limits(max_connections=None),
        )
        self.name, self.extra = model or "", extra or {}

    async def open(self) -> None:
        try:
            response = await self.client.get("/v1/models")
        except httpx.HTTPError as error:
            raise ConfigError(
                f"no server answers at {self.client.base_url} ({error}); start one first"
            ) from None
        if response.is_error:
            raise ConfigError(
                f"{self.client.base_url} answered {response.status_code}: {response.text[:300]}"
            )
        self.name = self.name or response.json()["data"][0]["id"]

    async def close(self) -> None:
        await self.client.aclose()

    async def send(self, work: Work) -> AsyncIterator[Piece]:
        body = {
            "model": self.name,
            "prompt": work.prompt,
            "max_tokens": work.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
            **work.extra,
        }
        body = {name: value for name, value in body.items() if value is not None}
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                text = (await response.aread()).decode(errors="replace")
                raise RuntimeError(f"HTTP {response.status_code}: {text[:300]}")
            async for line in response.aiter_lines():
                if line.startswith("data:") and not line.endswith("[DONE]"):
                    yield _piece(json.loads(line.removeprefix("data:")))


def _piece(event: dict[str, Any]) -> Piece:
    if "error" in event:
        raise RuntimeError(str(event["error"].get("message", event["error"])))
    usage = event.get("usage") or {}
    has_output = any(choice.get("text") for choice in event.get("choices", ()))
    return Piece(has_output, usage.get("completion_tokens"), usage.get("prompt_tokens"))
