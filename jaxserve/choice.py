"""One choice of a request as it grows: a sampled token goes in, the delta that it makes comes out."""

import time
from dataclasses import dataclass, field

import numpy as np

from jaxserve.errors import RequestError
from jaxserve.request import Delta, Logprob, Request
from jaxserve.sequence import Sequence
from jaxserve.text import Detokenizer, StopStrings, Tokenizer


class Prompted:
    """What a request asked to know of its prompt, collected chunk by chunk."""

    def __init__(self, scored: int | None):
        """`scored` is the prompt's length if log-probabilities are wanted; the first token has none."""
        self.logprobs: list[dict[int, Logprob] | None] | None = None
        if scored is not None:
            self.logprobs = [None for _ in range(scored)]
        self.hidden: np.ndarray | None = None  # [prompt tokens, D]


class Choice:
    """Decides when its sequence has ended, and which text may be shown."""

    def __init__(
        self, request: Request, seq: Sequence, seed: int, tokenizer: Tokenizer, eos: tuple[int, ...]
    ):
        self.seq, self.seed, self.params = seq, seed, request.params
        self.n_out = 0
        self.cumulative_logprob = 0.0
        self.last_at = time.monotonic()  # when the newest token was read
        params = request.params
        self._eos = () if params.ignore_eos else eos
        self._text = None
        if params.detokenize:
            self._text = Detokenizer(
                tokenizer,
                request.prompt_token_ids,
                params.skip_special_tokens,
                params.spaces_between_special_tokens,
            )
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None

    def advance(self, token: int, logprobs: dict[int, Logprob] | None) -> Delta:
        """The delta of a sampled token; with a finish_reason when the choice ends here."""
        self.n_out += 1
        if logprobs is not None:
            self.cumulative_logprob += logprobs[token].logprob
        if self.params.max_tokens == 0:
            return Delta(self.seq.index, finish_reason="length")
        reason, stop_reason = self._stopped_by(token)
        shown = reason is None or self.params.include_stop_str_in_output
        text = self._text.push([token]) if self._text and shown else ""
        if self._stops and self.n_out > self.params.min_tokens:
            text, matched = self._stops.push(text)
            if matched is not None and reason is None:
                reason, stop_reason = "stop", matched
        if reason is None and self.seq.prompt_len + self.n_out >= self.seq.max_len:
            reason = "length"
        if reason and not isinstance(stop_reason, str):
            rest, matched = self._rest()
            text += rest
            if matched is not None:
                reason, stop_reason = "stop", matched
        listed = None if logprobs is None or self.params.logprobs is None else [logprobs]
        return Delta(self.seq.index, text, [token], listed, finish_reason=reason, stop_reason=stop_reason)

    def resume(self, tokens: list[int]) -> None:
        """Go on after tokens that were sampled elsewhere, in the state that advancing by them leaves."""
        for token in tokens:
            if self.advance(token, None).finish_reason:
                raise RequestError(
                    f"the output so far ends the request at token {self.n_out} of {len(tokens)}: nothing is left to do",
                    param="generated",
                )

    def _stopped_by(self, token: int) -> tuple[str | None, int | None]:
        if self.n_out <= self.params.min_tokens:
            return None, None
        if token in self.params.stop_token_ids:
            return "stop", token
        return ("stop" if token in self._eos else None), None

    def _rest(self) -> tuple[str, str | None]:
        """What was held back as half a character or half a stop string, now that no more comes."""
        text = self._text.flush() if self._text else ""
        if not self._stops:
            return text, None
        text, matched = self._stops.push(text)
        return (text, matched) if matched is not None else (text + self._stops.flush(), None)


@dataclass
class Ongoing:
    """A request in the engine."""

    request: Request
    choices: list[Choice]
    arrived: float
    prompted: Prompted
    started: float | None = None  # when its first tokens were launched
    first_token: float | None = None
    unfinished: int = 0
    generated: int = 0
    finish_reason: str = "stop"
    held: dict[int, list[Delta]] = field(
        default_factory=dict
    )  # deltas by choice while the best are not known
