"""A streamed answer on its way through the router: what to ask the worker for, what the client gets of it.

The worker is asked for token ids and usage besides the text: with the ids another worker can go on when this one dies,
the usage tells how right the prediction was. What the client did not ask for is taken out again, chunk by chunk.
"""

import json
from typing import Any

from server.router.prompt_tokens import CHAT, COMPLETIONS
from server.stream import event

# A body with other fields may depend on more than its tokens (grammars, tool calls), so it is not gone on with.
_RESUMABLE = frozenset({
    "model", "messages", "prompt", "n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop", "stop_token_ids",
    "include_stop_str_in_output", "bad_words", "allowed_token_ids", "max_tokens", "max_completion_tokens",
    "min_tokens", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens",
    "add_special_tokens", "stream", "stream_options", "return_token_ids", "return_tokens_as_token_ids", "priority",
    "cache_salt", "request_id", "user", "metadata", "safety_identifier", "prompt_cache_key", "store",
    "service_tier", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
    "echo", "logprobs", "top_logprobs",
})  # fmt: skip


class WorkerError(Exception):
    """The worker ended the stream with an error event."""

    def __init__(self, body: dict[str, Any]):
        self.body = body
        super().__init__(str(body["error"].get("message", body["error"])))


class Passage:
    """One streamed answer, from one worker or from several that went on one after the other."""

    def __init__(self, path: str, body: dict[str, Any]):
        self._path, self._body = path, body
        options, wants_ids = body.get("stream_options") or {}, body.get("return_token_ids")
        self._options, self._wants_ids = options, bool(wants_ids)
        # What the worker will refuse goes to it as it is.
        valid = isinstance(options, dict) and wants_ids in (None, True, False)
        self._known = valid and path in (CHAT, COMPLETIONS)
        self._generated: list[int] = []
        self._begun = self._resumed = self._other_fields = False
        self._created: int | None = None
        self.usage: dict[str, Any] | None = None
        self.finished = False  # every choice has its finish_reason

    @property
    def resumable(self) -> bool:
        """Whether another worker can go on where this answer is now."""
        body = self._body
        one = body.get("n") in (None, 1) and body.get("best_of") in (None, 1)
        prompt = body.get("prompt")
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        offsets = self._path == COMPLETIONS and body.get("logprobs") is not None  # they count from the start
        plain = self._known and body.keys() <= _RESUMABLE and not self._other_fields
        return not self._begun or (plain and one and not several and not offsets)

    def request(self) -> dict[str, Any]:
        """The body for the worker that begins, or goes on."""
        if not self._known:
            return self._body
        asked = self._body | {
            "return_token_ids": True,
            "stream_options": self._options | {"include_usage": True},
        }
        self._resumed = bool(self._generated)
        if self._resumed:
            asked["generated_token_ids"] = self._generated
            asked.pop("echo", None)
        return asked

    def passed_on(self, data: bytes) -> bytes | None:
        """The event for the client, for one of the worker's; None for nothing. Raises WorkerError for its errors."""
        if not data.startswith(b"data: {"):
            return data + b"\n\n"
        chunk = json.loads(data[6:])
        if "error" in chunk:
            raise WorkerError(chunk)
        if not self._known:
            self._begun = True
            return data + b"\n\n"
        if chunk.get("usage"):
            self.usage = chunk["usage"]
        if not self._keeps(chunk):
            return None
        self._begun = True
        return event(chunk)

    def _keeps(self, chunk: dict[str, Any]) -> bool:
        """Take out of a chunk what the client did not ask for; False if nothing is left."""
        choices = chunk.get("choices", [])
        if not self._options.get("include_usage"):
            chunk.pop("usage", None)
            if not choices:
                return False
        elif choices and not self._options.get("continuous_usage_stats"):
            chunk["usage"] = None
        self._created = self._created or chunk.get("created")
        chunk["created"] = self._created
        if not self._wants_ids or self._resumed:
            chunk.pop("prompt_token_ids", None)
        if choices:
            chunk["choices"] = [choice for choice in choices if self._keeps_choice(choice)]
            return bool(chunk["choices"])
        return True

    def _keeps_choice(self, choice: dict[str, Any]) -> bool:
        ids = choice.get("token_ids") or []
        prompt = choice.get("prompt_token_ids") or []
        self._generated += ids[len(prompt) :] if self._body.get("echo") and not self._resumed else ids
        if not self._wants_ids:
            choice.pop("token_ids", None)
        if not self._wants_ids or self._resumed:
            choice.pop("prompt_token_ids", None)
        delta = choice.get("delta")
        if delta is not None:
            self._other_fields |= not delta.keys() <= {"role", "content"}
            if self._resumed:
                delta.pop("role", None)
        if choice.get("finish_reason"):
            self.finished = True
        said = delta if delta is not None else {"text": choice.get("text")}
        return bool(
            any(said.values())
            or choice.get("finish_reason")
            or choice.get("logprobs")
            or (self._wants_ids and ids)
        )
