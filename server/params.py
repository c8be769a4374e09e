"""From a request body to SamplingParams."""

from dataclasses import fields
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.sampling.params import SamplingParams
from server.schema import ChatRequest, CompletionRequest, Generate
from server.served import Served

_SAME = {f.name for f in fields(SamplingParams)} & Generate.model_fields.keys() - {"max_tokens", "logit_bias"}


def chat_params(served: Served, body: ChatRequest) -> SamplingParams:
    """How to sample a chat; without a limit it goes on to the model's."""
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    given = _fields(served, body)
    given["max_tokens"] = limit
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    try:
        if limit == 0:
            raise RequestError("max_tokens is 0, which asks for nothing; raise it", param="max_tokens")
        return SamplingParams(**given)
    except RequestError as why:
        raise _in_chats_words(why, body) from None


def completion_params(served: Served, body: CompletionRequest) -> SamplingParams:
    """How to sample a completion; `echo` with `logprobs` asks for the prompt's too."""
    given = _fields(served, body)
    given |= {
        name: getattr(body, name) for name in ("best_of", "logprobs") if getattr(body, name) is not None
    }
    if body.max_tokens is not None:
        given["max_tokens"] = body.max_tokens
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        given["prompt_logprobs"] = body.logprobs
    return SamplingParams(**given)


def _in_chats_words(error: RequestError, body: ChatRequest) -> RequestError:
    """The same complaint about the field that the caller wrote."""
    names = {"logprobs": "top_logprobs"} | (
        {"max_tokens": "max_completion_tokens"} if body.max_tokens is None else {}
    )
    if error.param not in names:
        return error
    name = names[error.param]
    return RequestError(str(error).replace(error.param, name, 1), param=name, code=error.code)


def _fields(served: Served, body: Generate) -> dict[str, Any]:
    if body.priority and served.engine.config.scheduling_policy != "priority":
        raise RequestError(
            "priority has no effect: requests are served in their order of arrival; start the server with "
            "--scheduling-policy priority",
            param="priority",
        )
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs")
    given = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    if body.logit_bias:
        given["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    return given
