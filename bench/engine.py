"""The engine in this process as the thing measured: no HTTP, the same requests."""

import itertools
from collections.abc import AsyncIterator

from bench.load import Piece
from bench.workloads import Work
from jaxserve import AsyncLLM, SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.request import Request


class EngineTarget:
    """An AsyncLLM behind the same face as a server."""

    def __init__(self, config: EngineConfig):
        self.config, self.name = config, config.model
        self.numbers = itertools.count()

    async def open(self) -> None:
        self.llm = AsyncLLM(self.config)

    async def close(self) -> None:
        self.llm.close()

    async def send(self, work: Work) -> AsyncIterator[Piece]:
        prompt = work.prompt
        token_ids = self.llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        fields = {"max_tokens": work.output_len, "temperature": 0.0, "ignore_eos": True, **work.extra}
        request = Request(f"bench-{next(self.numbers)}", token_ids, SamplingParams(**fields))
        count = 0
        async for delta in self.llm.submit(request):
            if delta.error:
                raise RuntimeError(delta.error)
            count += len(delta.token_ids)
            yield Piece(bool(delta.token_ids), count, len(token_ids))
