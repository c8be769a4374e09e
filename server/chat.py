"""`jaxserve chat`: a conversation in the terminal, with a running server or a model in this process.

On a terminal it has line editing and history, and shows the speed after each answer; in a pipe every line of
stdin is a turn and only the answers come out. Ctrl-C stops an answer, not the program.
"""

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, JaxserveError, RequestError

HELP = """  /reset          forget the conversation (the system prompt stays)
  /system [TEXT]  set the system prompt, or show it
  /save FILE      write the conversation as JSON messages
  /help           this
  /exit           leave (so does Ctrl-D)
  Ctrl-C          stop the answer; a line that ends in \\ goes on in the next"""


class Peer(Protocol):
    """Whoever answers: yields (text, number of new tokens), the number being 0 where it is not known."""

    name: str

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    def answer(self, messages: list[dict], sampling: dict[str, Any]) -> AsyncIterator[tuple[str, int]]: ...


class Server:
    """A server that speaks OpenAI's chat completions."""

    def __init__(self, url: str, api_key: str | None = None):
        import httpx

        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.client = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=httpx.Timeout(600, connect=5)
        )
        self.name = ""

    async def open(self) -> None:
        models = await self._get("/v1/models")
        self.name = models["data"][0]["id"]

    async def close(self) -> None:
        await self.client.aclose()

    async def answer(self, messages, sampling):
        body = {"model": self.name, "messages": messages, "stream": True, **sampling}
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        seen = 0
        async with self._errors(), self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                raise RequestError(_message(await response.aread()))
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RequestError(event["error"]["message"])
                total = (event.get("usage") or {}).get("completion_tokens", seen)
                text = event["choices"][0]["delta"].get("content") if event["choices"] else None
                yield text or "", total - seen
                seen = total

    async def _get(self, path: str) -> dict:
        async with self._errors():
            response = await self.client.get(path)
        if response.is_error:
            raise ConfigError(f"{self.url} answered {response.status_code}: {_message(response.content)}")
        return response.json()

    @contextlib.asynccontextmanager
    async def _errors(self):
        import httpx

        try:
            yield
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise ConfigError(f"no answer from {self.url} ({why}); is the server running there?") from None


class Engine:
    """A model in this process."""

    def __init__(self, config: EngineConfig):
        self.config, self.name = config, Path(config.model).name
        self.numbers = itertools.count()

    async def open(self) -> None:
        from jaxserve import AsyncLLM

        self.llm = AsyncLLM(self.config)

    async def close(self) -> None:
        self.llm.close()

    async def answer(self, messages, sampling):
        from jaxserve import SamplingParams
        from jaxserve.request import Request

        token_ids, prompt = self.llm.tokenizer.encode_chat(messages)
        request = Request(f"chat-{next(self.numbers)}", token_ids, SamplingParams(**sampling), prompt)
        async with contextlib.aclosing(self.llm.submit(request)) as deltas:
            async for delta in deltas:
                if delta.error:
                    raise RequestError(delta.error)
                yield delta.text, len(delta.token_ids)


@dataclass
class Conversation:
    """The turns so far and the system prompt before them."""

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}, *self.turns] if self.system else self.turns

    def command(self, line: str) -> str | None:
        """What a line that begins with / has to say; None to leave."""
        name, _, argument = line.partition(" ")
        match name:
            case "/exit" | "/quit":
                return None
            case "/help":
                return HELP
            case "/reset":
                self.turns.clear()
                return "the conversation begins anew"
            case "/system":
                self.system = argument or self.system
                return f"system prompt: {self.system or '(none)'}"
            case "/save":
                return self._save(argument.strip())
        return f"there is no {name}; /help lists the commands"

    def _save(self, path: str) -> str:
        if not path:
            return "/save needs the name of a file"
        try:
            Path(path).write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n")
        except OSError as error:
            return f"cannot write {path}: {error.strerror}"
        return f"{len(self.messages)} messages written to {path}"


def run(peer: Peer, *, system: str, sampling: dict[str, Any]) -> None:
    """Talk until /exit or the end of the input."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    conversation = Conversation(system)
    with asyncio.Runner() as runner, _line_editing(interactive):
        runner.run(peer.open())
        try:
            if interactive:
                print(f"{peer.name}: /help lists the commands", file=sys.stderr)
            while (line := _read_line(interactive)) is not None:
                if line.startswith("/"):
                    if (said := conversation.command(line)) is None:
                        break
                    print(said, file=sys.stderr)
                elif line.strip():
                    _turn(runner, peer, conversation, line, sampling, interactive)
        finally:
            runner.run(peer.close())


def _turn(runner, peer: Peer, conversation: Conversation, line: str, sampling, interactive: bool) -> None:
    """One question and its answer; what had come before a Ctrl-C or an error stays in the conversation."""
    conversation.turns.append({"role": "user", "content": line})
    answer = _Answer()
    try:
        if any("\ud800" <= character <= "\udfff" for character in line):  # what Python reads bad bytes as
            raise RequestError("a line is not valid UTF-8 text")
        runner.run(answer.stream(peer.answer(conversation.messages, sampling)))
    except KeyboardInterrupt:
        print(" [stopped]", end="", file=sys.stderr)
    except JaxserveError as error:
        if not interactive:
            raise
        print(f"error: {error}", file=sys.stderr)
    print(flush=True)
    if answer.text:
        conversation.turns.append({"role": "assistant", "content": answer.text})
    else:
        conversation.turns.pop()  # a question without an answer would break the alternation
    if interactive and answer.tokens:
        print(f"\033[2m{answer.speed()}\033[0m", file=sys.stderr)


class _Answer:
    """An answer as it comes in, and how fast it came."""

    def __init__(self):
        self.text, self.tokens = "", 0
        self.began = self.last = time.perf_counter()
        self.first: float | None = None  # when the first piece came

    async def stream(self, pieces: AsyncIterator[tuple[str, int]]) -> None:
        async for text, tokens in pieces:
            if text or tokens:
                self.last = time.perf_counter()
                self.first = self.first or self.last
            self.text, self.tokens = self.text + text, self.tokens + tokens
            print(text, end="", flush=True)

    def speed(self) -> str:
        first = self.first or self.last
        wait = f"first token after {first - self.began:.2f} s"
        if self.tokens < 2 or self.last == first:
            return f"{self.tokens} tokens, {wait}"
        return f"{self.tokens} tokens, {(self.tokens - 1) / (self.last - first):.1f} tokens/s, {wait}"


def _read_line(interactive: bool) -> str | None:
    """The next turn, or None at the end of the input; Ctrl-C at the prompt drops the line."""
    lines: list[str] = []
    while True:
        try:
            prompt = "" if not interactive else "... " if lines else "> "
            lines.append(input(prompt))
        except EOFError:
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:
            if not interactive:
                raise
            lines.clear()
            print()
            continue
        if not lines[-1].endswith("\\"):
            return "\n".join(lines)
        lines[-1] = lines[-1][:-1]


@contextlib.contextmanager
def _line_editing(interactive: bool):
    """Editing keys and a history that outlives the program."""
    if not interactive:
        yield
        return
    import readline

    path = Path("~/.cache/jaxserve/chat_history").expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            readline.write_history_file(path)


def _message(body: bytes) -> str:
    """The message of an OpenAI error body, or the body."""
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")
