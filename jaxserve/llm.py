"""LLM: a model in this process, for offline use; names and results as in vLLM."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxserve.async_llm import engine_config, refuse_to_follow
from jaxserve.build import build
from jaxserve.config import EngineConfig
from jaxserve.errors import EngineError, RequestError
from jaxserve.metrics import Metrics
from jaxserve.outputs import Collected
from jaxserve.request import Request, RequestOutput
from jaxserve.sampling.checks import shown
from jaxserve.sampling.params import SamplingParams

Prompt = (
    str | Sequence[int] | Mapping[str, Any]
)  # text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}


@dataclass(frozen=True)
class Score:
    """How likely a continuation is after its prompt."""

    logprob: float  # of the whole continuation
    token_logprobs: list[float]
    token_ids: list[int]
    is_greedy: bool  # whether each token is the most likely one


class LLM:
    """A model, loaded and compiled; each call runs its requests to the end, batched as they fit.

    Not for several threads at once: `AsyncLLM` is.
    """

    def __init__(self, model: str | EngineConfig, **settings: Any):
        config = engine_config(model, settings)
        refuse_to_follow(config)
        self.registry = CollectorRegistry()
        built = build(config, Metrics(self.registry, config.model))
        self.config, self.model_config, self.tokenizer = built.config, built.model_config, built.tokenizer
        self.engine = built.engine
        self._ids = itertools.count()
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt, in order; `sampling_params` for all of them, or one each.

        `use_tqdm` shows a progress bar (vLLM's name for it).
        """
        listed = _listed(prompts)
        params = _one_each(SamplingParams() if sampling_params is None else sampling_params, len(listed))
        requests = [self._request(prompt, p) for prompt, p in zip(listed, params, strict=True)]
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        tokenizer = self.tokenizer.with_chat_template(chat_template) if chat_template else self.tokenizer
        prompts = []
        for conversation in conversations:
            token_ids, text = tokenizer.encode_chat(
                list(conversation),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs,
            )
            prompts.append({"prompt": text, "prompt_token_ids": token_ids})
        return self.generate(prompts, sampling_params, use_tqdm)

    def score(
        self, prompts: Prompt | Sequence[Prompt], continuations: Prompt | Sequence[Prompt]
    ) -> list[Score]:
        """The log-probability of each continuation after its prompt, in one prefill each.

        Text continuations are tokenised on their own, without special tokens, and appended.
        """
        firsts, seconds = _listed(prompts), _listed(continuations)
        if len(firsts) != len(seconds):
            raise RequestError(
                f"{len(firsts)} prompts and {len(seconds)} continuations; give one continuation for each prompt",
                param="continuations",
            )
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=0)
        requests, lengths = [], []
        for first, second in zip(firsts, seconds, strict=True):
            start, rest = self._tokens(first)[0], self._tokens(second, add_special_tokens=False)[0]
            if not rest:
                raise RequestError("a continuation is empty; it must have a token", param="continuations")
            requests.append(self._request({"prompt_token_ids": [*start, *rest]}, params))
            lengths.append(len(rest))
        return [_score(output, n) for output, n in zip(self._run(requests, False), lengths, strict=True)]

    def hidden_states(self, prompts: Prompt | Sequence[Prompt]) -> list[np.ndarray]:
        """float32 [tokens, D] for each prompt: the states after the model's last norm."""
        params = SamplingParams(max_tokens=0, temperature=0)
        requests = [replace(self._request(prompt, params), hidden_states=True) for prompt in _listed(prompts)]
        return [output.hidden_states for output in self._run(requests, False)]  # type: ignore[misc]

    def expert_loads(self) -> np.ndarray | None:
        """int64 [mixture layers, E]: rows that chose each expert since the start; None for a model without any."""
        return self.engine.experts and self.engine.experts.totals().experts

    def close(self) -> None:
        """Stop what still runs in the background; nothing is answered after. Twice does no harm."""
        self._closed = True
        self.engine.close()

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        if self._closed:
            raise EngineError("the engine is closed; make another LLM to go on")
        token_ids, text = self._tokens(prompt)
        return self.engine.prepare(Request(str(next(self._ids)), token_ids, params, text))

    def _tokens(self, prompt: Prompt, add_special_tokens: bool = True) -> tuple[list[int], str | None]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens), prompt
        if isinstance(prompt, Mapping):
            unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise RequestError(
                    f"a prompt has {sorted(unknown) or 'nothing'}; give prompt or prompt_token_ids",
                    param="prompts",
                )
            text = prompt.get("prompt")
            if prompt.get("prompt_token_ids") is not None:
                return list(prompt["prompt_token_ids"]), text
            return self._tokens(text or "", add_special_tokens)
        if not isinstance(prompt, Sequence | np.ndarray):
            raise RequestError(
                f"a prompt is {shown(prompt)}; give a text, token ids, or a dict of prompt or prompt_token_ids",
                param="prompts",
            )
        return list(prompt), None

    def _run(self, requests: list[Request], show_progress: bool) -> list[RequestOutput]:
        collected = {request.request_id: Collected(request) for request in requests}
        columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        try:
            with Progress(
                *columns, console=Console(stderr=True), disable=not show_progress, transient=True
            ) as bar:
                task = bar.add_task("", total=len(requests))
                for request in requests:
                    self.engine.add(request)
                while self.engine.busy:
                    for request_id, delta in self.engine.step():
                        if collected[request_id].add(delta):
                            bar.advance(task)
        except BaseException:
            self.engine.reset()
            raise
        failed = next((c.error for c in collected.values() if c.error), None)
        if failed:
            raise EngineError(failed)
        return [collected[request.request_id].output() for request in requests]


def _listed(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts is {type(prompts).__name__}; give a text, token ids, or a list of either",
            param="prompts",
        )
    prompts = list(prompts)
    return [prompts] if prompts and all(isinstance(p, int | np.integer) for p in prompts) else prompts


def _one_each(params: Any, count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(
            f"{count} prompts and {len(params)} sampling_params; give one for all, or one for each prompt",
            param="sampling_params",
        )
    return list(params)


def _score(output: RequestOutput, length: int) -> Score:
    assert output.prompt_logprobs is not None
    token_ids = output.prompt_token_ids[-length:]
    entries = [(e or {}).get(t) for e, t in zip(output.prompt_logprobs[-length:], token_ids, strict=True)]
    # Without a prompt, the first token has no probability: nothing came before it.
    found = [entry for entry in entries if entry is not None]
    logprobs = [entry.logprob for entry in found]
    return Score(sum(logprobs), logprobs, token_ids, all(entry.rank == 1 for entry in found))
