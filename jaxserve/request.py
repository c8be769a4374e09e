"""What goes into the engine and what comes out: requests, deltas and finished outputs."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jaxserve.layer_groups import LayerGroup
from jaxserve.sampling.params import SamplingParams
from jaxserve.sequence import Sequence


@dataclass(frozen=True)
class Request:
    """A prompt in tokens, and how to go on from it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None  # the text, when there was one; only handed back
    priority: int = 0  # lower is served first, as in vLLM
    cache_salt: str = ""  # requests share cached prefixes only with requests of the same salt
    hidden_states: bool = False  # hand back the last layer's states of the prompt
    generated: list[int] = field(
        default_factory=list
    )  # output made elsewhere already: the request goes on after it, and hands back only what is new
    trace_id: str | None = None  # what its timeline is filed under, if not its own id
    prefill_url: str | None = None  # the worker that is to compute the prompt, if not this one
    # Told of every step, one group of layers after the other as they are launched, on the engine's thread.
    watch: Callable[[Sequence, LayerGroup], None] | None = None


@dataclass(frozen=True)
class Logprob:
    """One token's log-probability under the model, before temperature and filters."""

    logprob: float
    rank: int | None = None  # 1 is the most likely
    decoded_token: str | None = None


@dataclass(frozen=True)
class Delta:
    """What one step adds to one of a request's choices.

    The deltas of a choice, joined, are its whole output; exactly the last one has a `finish_reason`
    ("stop", "length", "abort" or "error").
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = (
        None  # one dict a token: the sampled one first, then the top ones
    )
    prompt_logprobs: list[dict[int, Logprob] | None] | None = (
        None  # on the choice's first delta, when asked for
    )
    hidden_states: np.ndarray | None = None  # float32 [prompt tokens, D], on the first delta, when asked for
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop token or string that ended it
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    error: str | None = None  # with finish_reason "error": what went wrong


@dataclass
class CompletionOutput:
    """One finished choice (vLLM's names)."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A finished request (vLLM's names)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    hidden_states: np.ndarray | None = None
    finished: bool = True
    num_cached_tokens: int = 0
