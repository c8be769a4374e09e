"""A stand-in for the engine that says the same words to everyone: real tokenizer and checks, no model."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from jaxserve.async_llm import Load
from jaxserve.config import EngineConfig
from jaxserve.errors import OverloadedError, RequestError
from jaxserve.metrics import Metrics
from jaxserve.pace import StepTimes
from jaxserve.request import Delta, Logprob, Request
from jaxserve.text import ChatTemplate, Detokenizer, StopStrings, Tokenizer
from kv.events import Events

WORDS = "Grüße aus der Küche! 🎉 one two three\nfour five 六七 eight nine ten, and so on."
TEMPLATE = (
    "{% if messages[0].role == 'user' and messages[0].content == 'refuse me' %}"
    "{{ raise_exception('this template takes no such talk') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(bos: str | None = "<|bos|>") -> Tokenizer:
    """A tokenizer of single bytes, ChatML's special tokens and a few merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("o", "n"), ("on", "e"), ("t", "w"), ("tw", "o"), ("i", "v")]
    vocab = {token: i for i, token in enumerate([*letters, *(a + b for a, b in merges)])}
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    if bos:
        bos_id = backend.token_to_id(bos)
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, bos_id)]
        )
    named = {"eos_token": "<|im_end|>"} | ({"bos_token": bos} if bos else {})
    eos = backend.token_to_id("<|im_end|>")
    return Tokenizer(
        backend,
        named_tokens=named,
        eos_token_ids=(eos,),
        chat_template=ChatTemplate({"default": TEMPLATE}, named),
    )


@dataclass(frozen=True)
class FakeHealth:
    state: str
    detail: str = ""


@dataclass
class FakeEngine:
    """Says WORDS from the seed-th token on; its fields make it slow, full, broken or anything but ready."""

    tokenizer: Tokenizer = field(default_factory=byte_tokenizer)
    config: EngineConfig = field(default_factory=lambda: EngineConfig("models/fake", max_model_len=256))
    state: str = "ready"
    full: bool = False
    delay: float = 0.0  # seconds before each token
    first_delay: float = 0.0  # seconds before the first one
    fails_at: int | None = None  # the token instead of which the engine fails
    explodes_at: int | None = None  # the token instead of which the iterator raises what it should not
    active: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    seen: list[Request] = field(default_factory=list)

    def __post_init__(self):
        self.metrics = Metrics(CollectorRegistry(), "fake")
        self.registry = self.metrics.registry
        self.cache_events, self.step_times = Events(), StepTimes()
        self._stopping = asyncio.Event()

    def health(self) -> FakeHealth:
        return FakeHealth(self.state)

    def submit(self, request: Request) -> "Stream":
        if self.full:
            self.metrics.on_rejected("queue_full")
            raise OverloadedError("256 requests are waiting already; try again later", retry_after=1.5)
        request.params.check(self.tokenizer.vocab_size, self.config.max_logprobs)
        if any(not 0 <= token < self.tokenizer.vocab_size for token in request.prompt_token_ids):
            raise RequestError("a token of the prompt is not in the vocabulary", param="prompt")
        self.seen.append(request)
        return Stream(self, request)

    def load(self) -> Load:
        return Load(len(self.active), 0, 0, 0.0)

    async def drain(self, timeout: float) -> None:
        self.state = "draining"
        deadline = asyncio.get_running_loop().time() + timeout
        while self.active and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        self._stopping.set()

    def close(self) -> None:
        self.state = "dead"

    async def say(self, request: Request) -> AsyncIterator[Delta]:
        """The deltas of all choices, in turns."""
        await self._wait(self.first_delay)
        choices = [self._choice(request, index) for index in range(request.params.n)]
        told: set[int] = set()
        while choices:
            await self._wait(self.delay)
            if self._stopping.is_set():
                for index in {c[0] for c in choices}:
                    yield Delta(index, finish_reason="abort", error="the server is shutting down")
                return
            for choice in list(choices):
                delta = next(choice[1], None)
                if delta is None:
                    choices.remove(choice)
                    continue
                if delta.index not in told:
                    delta = self._first(request, delta)
                told.add(delta.index)
                yield delta

    async def _wait(self, seconds: float) -> None:
        if seconds:
            try:
                await asyncio.wait_for(self._stopping.wait(), seconds)
            except TimeoutError:
                return
        else:
            await asyncio.sleep(0)

    def _first(self, request: Request, delta: Delta) -> Delta:
        scores = None
        if request.params.prompt_logprobs is not None:
            ids = request.prompt_token_ids
            scores = [None, *(self._logprobs(token, request.params.prompt_logprobs) for token in ids[1:])]
        return Delta(**{**vars(delta), "prompt_logprobs": scores, "num_cached_tokens": 1})

    def _choice(self, request: Request, index: int):
        return index, self._deltas(request, index)

    def _deltas(self, request: Request, index: int):
        params, eos = request.params, self.tokenizer.eos_token_ids[0]
        if params.max_tokens == 0:
            yield Delta(index, finish_reason="length")
            return
        words = self.tokenizer.encode(WORDS, add_special_tokens=False)
        start = ((params.seed or 0) + index) % len(words)
        words = [*words[start:], *(words * 40 if params.ignore_eos else [eos])]
        room = self.config.max_model_len - len(request.prompt_token_ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        text = Detokenizer(self.tokenizer, request.prompt_token_ids, params.skip_special_tokens)
        stops = StopStrings(params.stop, params.include_stop_str_in_output)
        for i, token in enumerate(words[:limit]):
            if i == self.fails_at:
                yield Delta(index, finish_reason="error", error="the logits were not finite")
                return
            if i == self.explodes_at:
                raise RuntimeError("secret details")
            ended = token == eos and not params.ignore_eos
            safe, matched = ("", None) if ended else stops.push(text.push([token]))
            if matched is None and (ended or i + 1 == limit):
                rest, matched = stops.push(text.flush())
                safe += rest + ("" if matched else stops.flush())
            finish = "stop" if ended or matched else "length" if i + 1 == limit else None
            logprobs = None if params.logprobs is None else [self._logprobs(token, params.logprobs)]
            if i >= len(request.generated):
                yield Delta(index, safe, [token], logprobs, finish_reason=finish, stop_reason=matched)
            if finish:
                return

    def _logprobs(self, token: int, top: int) -> dict[int, Logprob]:
        size = self.tokenizer.vocab_size
        others = {(token + step) % size: Logprob(-1.0 - step, step) for step in range(1, top + 1)}
        return {token: Logprob(-math.inf if token == 7 else -9.5, top + 1), **others}


class Stream:
    """What `submit` gives: an iterator of deltas, whose closing aborts the request."""

    def __init__(self, engine: FakeEngine, request: Request):
        self._engine, self._id, self._deltas = engine, request.request_id, engine.say(request)
        assert self._id not in engine.active
        engine.active.add(self._id)

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Delta:
        try:
            return await anext(self._deltas)
        except (StopAsyncIteration, RuntimeError):
            self._engine.active.discard(self._id)
            raise

    async def aclose(self) -> None:
        await self._deltas.aclose()  # type: ignore[attr-defined]
        if self._id in self._engine.active:
            self._engine.active.discard(self._id)
            self._engine.aborted.append(self._id)
