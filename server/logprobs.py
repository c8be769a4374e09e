"""Log-probabilities in the shapes of the chat and the completions API."""

from collections.abc import Sequence
from typing import Any

from jaxserve.request import Logprob

LOWEST = -9999.0  # in JSON, which has no minus infinity


class LogprobsWriter:
    """Writes the tokens of one request; `as_ids` writes "token_id:7" instead of text."""

    def __init__(self, tokenizer: Any, top: int, as_ids: bool):
        self._tokenizer, self._top, self._as_ids = tokenizer, top, as_ids

    def chat(self, token_ids: list[int], entries: list[dict[int, Logprob]]) -> dict[str, Any]:
        """Chat's `logprobs`: each token with its bytes, its log-probability and the likeliest alternatives."""
        content = []
        for token, entry in zip(token_ids, entries, strict=True):
            ranked = sorted(entry.items(), key=lambda item: -item[1].logprob)[: self._top]
            tops = [self._token(other, logprob) for other, logprob in ranked]
            content.append(self._token(token, entry[token]) | {"top_logprobs": tops})
        return {"content": content, "refusal": None}

    def completion(
        self, token_ids: list[int], entries: Sequence[dict[int, Logprob] | None], offset: int
    ) -> tuple[dict[str, Any], int]:
        """Completions' `logprobs`, and the text offset after them. A prompt's first token has none."""
        out: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in zip(token_ids, entries, strict=True):
            shown = self._text(token, entry[token] if entry else None)
            out["tokens"].append(shown)
            out["text_offset"].append(offset)
            out["token_logprobs"].append(_finite(entry[token].logprob) if entry else None)
            tops: dict[str, float] = {}
            for other, logprob in (entry or {}).items():  # tokens of equal text are one entry: the likelier
                text = self._text(other, logprob)
                tops[text] = max(_finite(logprob.logprob), tops.get(text, LOWEST))
            out["top_logprobs"].append(tops or None)
            offset += len(shown)
        return out, offset

    def prompt(self, entries: Sequence[dict[int, Logprob] | None]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: by token id."""
        return [
            None if entry is None else {str(token): self._of_prompt(token, p) for token, p in entry.items()}
            for entry in entries
        ]

    def _of_prompt(self, token: int, p: Logprob) -> dict[str, Any]:
        return {"logprob": _finite(p.logprob), "rank": p.rank, "decoded_token": self._text(token, p)}

    def _token(self, token: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": self._text(token, logprob),
            "logprob": _finite(logprob.logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }

    def _text(self, token: int, logprob: Logprob | None) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        return self._tokenizer.token_bytes(token).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
