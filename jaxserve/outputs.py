"""Deltas joined into whole outputs."""

from jaxserve.request import CompletionOutput, Delta, Logprob, Request, RequestOutput


class Collected:
    """One request's deltas so far."""

    def __init__(self, request: Request):
        self.request = request
        self.error: str | None = None
        self._choices: dict[int, list[Delta]] = {}
        self._left = request.params.n

    def add(self, delta: Delta) -> bool:
        """Take a delta; True when it was the request's last."""
        self._choices.setdefault(delta.index, []).append(delta)
        if delta.finish_reason:
            self._left -= 1
            self.error = delta.error or self.error
        return not self._left

    def output(self) -> RequestOutput:
        """The finished request."""
        first = self._choices[min(self._choices)][0]
        return RequestOutput(
            self.request.request_id,
            self.request.prompt,
            self.request.prompt_token_ids,
            [_joined(index, self._choices[index]) for index in sorted(self._choices)],
            prompt_logprobs=first.prompt_logprobs,
            hidden_states=first.hidden_states,
            num_cached_tokens=first.num_cached_tokens,
        )


def _joined(index: int, deltas: list[Delta]) -> CompletionOutput:
    token_ids = [token for delta in deltas for token in delta.token_ids]
    logprobs: list[dict[int, Logprob]] | None = None
    total = None
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
        total = sum(entry[token].logprob for entry, token in zip(logprobs, token_ids, strict=True))
    last = deltas[-1]
    text = "".join(delta.text for delta in deltas)
    return CompletionOutput(index, text, token_ids, total, logprobs, last.finish_reason, last.stop_reason)
