"""Requests, deltas and the words of a handover as JSON, for workers that talk to each other."""

import dataclasses
from typing import Any

from jaxserve.handover.messages import Block, First, Granted, Message
from jaxserve.request import Delta, Logprob, Request
from jaxserve.sampling.params import SamplingParams

_SAID = {Granted: "lease", Block: "block"}  # the key under which each stands on its line
_REQUEST = ("request_id", "prompt_token_ids", "priority", "cache_salt")


def request_json(request: Request) -> dict[str, Any]:
    """What another worker needs to compute the prompt and its first token."""
    given = {
        field.name: value
        for field in dataclasses.fields(SamplingParams)
        if (value := getattr(request.params, field.name)) != field.default
    }
    return {name: getattr(request, name) for name in _REQUEST} | {"params": given}


def request_from(found: dict[str, Any]) -> Request:
    params = dict(found["params"])
    if params.get("logit_bias"):
        params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    return Request(**{name: found[name] for name in _REQUEST}, params=SamplingParams(**params))


def message_json(message: Message) -> dict[str, Any]:
    if isinstance(message, First):
        return {"first": delta_json(message.delta)}
    return {_SAID[type(message)]: dataclasses.asdict(message)}


def message_from(line: dict[str, Any]) -> Message:
    ((key, said),) = line.items()
    if key == "first":
        return First(delta_from(said))
    return {"lease": Granted, "block": Block}[key](**said)


def delta_json(delta: Delta) -> dict[str, Any]:
    """Without what is only ever known of a whole prompt."""
    return {
        "index": delta.index,
        "text": delta.text,
        "token_ids": delta.token_ids,
        "logprobs": delta.logprobs
        and [[(token, *dataclasses.astuple(said)) for token, said in of.items()] for of in delta.logprobs],
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
        "num_cached_tokens": delta.num_cached_tokens,
        "error": delta.error,
    }


def delta_from(found: dict[str, Any]) -> Delta:
    logprobs = found["logprobs"]
    listed = logprobs and [{token: Logprob(*said) for token, *said in of} for of in logprobs]
    fields: dict[str, Any] = found | {"logprobs": listed}
    return Delta(**fields)
