"""What is refused before it is queued: a request that can never be served as it stands."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral

from jaxserve.config import EngineConfig
from jaxserve.errors import RequestError
from jaxserve.request import Request
from jaxserve.sampling.admission import check_possible
from jaxserve.sampling.checks import integer, refuse, shown


@dataclass(frozen=True)
class Limits:
    """What a model and its deployment allow."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def checked(
    request: Request, limits: Limits, config: EngineConfig, bad_words: Sequence[tuple[int, ...]]
) -> Request:
    """The request as it will run, its prompt truncated and a copy; or a RequestError that says why it never can."""
    params = request.params
    params.check(limits.vocab_size, config.max_logprobs)
    check_possible(params, limits.vocab_size, bad_words, limits.eos_token_ids)
    _check_order(request, config)
    if request.hidden_states and config.nnodes > 1:
        raise RequestError(
            f"hidden states stay on the {config.nnodes} processes that computed them; ask an engine of one process",
            param="hidden_states",
        )
    prompt = _tokens(request.prompt_token_ids, limits.vocab_size)
    if request.generated:
        _check_generated(request, limits)
    room = limits.max_model_len - (1 if params.max_tokens is None else params.max_tokens)
    keep = params.truncate_prompt_tokens
    if keep is not None:
        prompt = prompt[-max(room if keep == -1 else keep, 1) :]
    if len(prompt) > room:
        raise _too_long(len(prompt), limits.max_model_len - room, limits.max_model_len)
    return replace(request, prompt_token_ids=prompt)


def _check_order(request: Request, config: EngineConfig) -> None:
    if not isinstance(request.cache_salt, str):
        raise refuse("cache_salt", request.cache_salt, "a string")
    priority = integer("priority", request.priority, -(2**31), 2**31 - 1)
    if priority and config.scheduling_policy != "priority":
        raise RequestError(
            f"priority={priority} has no effect, as requests are served in their order of arrival; "
            'set scheduling_policy="priority"',
            param="priority",
        )


def _check_generated(request: Request, limits: Limits) -> None:
    params = request.params
    if (params.best_of or params.n) > 1 or params.prompt_logprobs is not None or request.hidden_states:
        raise RequestError(
            "only a request for one choice and nothing of its prompt can go on after output made elsewhere; "
            "leave out n, best_of and prompt_logprobs, or send it from the start",
            param="generated",
        )
    wrong = next((token for token in request.generated if not 0 <= token < limits.vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"generated has token id {shown(wrong)}, and the vocabulary has {limits.vocab_size} tokens",
            param="generated",
        )


def _tokens(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Plain integers, each a token of the vocabulary."""
    if not token_ids:
        raise RequestError("the prompt is empty; it must have at least one token", param="prompt")
    for token in token_ids:
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
            raise RequestError(
                f"prompt has token id {shown(token)}, and the vocabulary has {vocab_size} tokens; "
                f"use integers from 0 to {vocab_size - 1}",
                param="prompt",
            )
    return [int(token) for token in token_ids]


def _too_long(prompt: int, output: int, limit: int) -> RequestError:
    """In OpenAI's words, which clients look for."""
    return RequestError(
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{prompt + output} tokens ({prompt} in the messages, {output} in the completion). "
        "Please reduce the length of the messages or completion.",
        param="messages",
        code="context_length_exceeded",
    )
