"""SamplingParams: how a request wants its tokens chosen (vLLM's names), checked as soon as it is made."""

from dataclasses import dataclass, fields
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.sampling.checks import flag, in_vocabulary, integer, number, refuse, strings, token_ids

MAX_LOGPROBS = 20  # alternatives the step returns for a token
MAX_CHOICES = 128  # of n and best_of
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters
MAX_STOP_TOKENS = 128
MAX_BAD_WORDS = 64
MAX_BAD_WORD_LENGTH = 128  # characters
MAX_BAD_WORD_TOKENS = 8
GREEDY_BELOW = 1e-5  # temperatures below it are 0, as in vLLM
_INT32 = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of a request, and when to stop.

    In the order of effect: logit_bias, allowed_token_ids, bad_words and min_tokens, then the penalties, then
    the most likely token if temperature is 0, else temperature, min_p, top_k, top_p and a draw.
    Log-probabilities are the model's own, before all of it. Anything malformed or out of range is a
    RequestError that names its field.
    """

    n: int = 1
    best_of: int | None = None  # choices made, of which the n with the highest mean log-probability are given
    presence_penalty: float = 0.0  # off the logit of each token already in the output
    frequency_penalty: float = 0.0  # the same, times how often it is there
    repetition_penalty: float = 1.0  # on tokens in prompt or output: positive logits / it, others * it
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0  # relative to the most likely token
    seed: int | None = None  # None: the engine chooses one
    stop: Any = None  # a string or a list of them; kept as a tuple
    stop_token_ids: Any = None  # kept as a tuple
    bad_words: Any = None  # texts that may not appear in the output; kept as a tuple
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: to the model's limit; 0: the prompt is computed, and that is all
    min_tokens: int = 0  # before it, neither the end of sequence nor a stop token is chosen
    logprobs: int | None = None  # alternatives for each token, besides the chosen one
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Any = None  # kept as a tuple, or None
    truncate_prompt_tokens: int | None = None  # keep the prompt's last ones; -1: as many as fit

    def __post_init__(self):
        for f in fields(self):
            check = _CHECKS[f.name]
            object.__setattr__(self, f.name, check(f.name, getattr(self, f.name)))
        self._check_together()

    def _check_together(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise refuse("best_of", self.best_of, f"at least n, {self.n}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refuse("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop strings are looked for in the text, and detokenize is false; use stop_token_ids",
                param="stop",
            )
        if self.logit_bias and self.allowed_token_ids is not None:
            outside = set(self.logit_bias).difference(self.allowed_token_ids)
            if outside:
                raise RequestError(
                    f"logit_bias has token {min(outside)}, which allowed_token_ids excludes, so it would do "
                    "nothing; take it out of the one or put it into the other",
                    param="logit_bias",
                )

    def check(self, vocab_size: int, max_logprobs: int = MAX_LOGPROBS) -> None:
        """Refuse what this model or server cannot do: ids it has not, more alternatives than it gives."""
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            in_vocabulary(name, getattr(self, name) or (), vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(self, name)
            if asked is not None and asked > max_logprobs:
                raise refuse(name, asked, f"at most {max_logprobs}, this server's max_logprobs")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


def _optional(check):
    return lambda name, value: None if value is None else check(name, value)


def _within(check, low, high, also=""):
    return lambda name, value: check(name, value, low, high, also)


def _temperature(name: str, value: Any) -> float:
    temperature = number(name, value, 0, 100, " (0 takes the most likely token)")
    return 0.0 if temperature < GREEDY_BELOW else temperature


def _positive(high: float):
    def check(name: str, value: Any) -> float:
        if number(name, value, 0, high, ", more than 0") == 0:
            raise refuse(name, value, f"a number above 0 and at most {high:g}")
        return float(value)

    return check


def _top_k(name: str, value: Any) -> int:
    return max(integer(name, value, -1, _INT32, " (0 or -1 keeps all tokens)"), 0)


def _logprobs(name: str, value: Any) -> int:
    if isinstance(value, int) and value == -1:
        raise RequestError(
            f"{name} is -1, the whole vocabulary, and a step returns {MAX_LOGPROBS} at most; ask for those",
            param=name,
        )
    return integer(name, value, 0, MAX_LOGPROBS)


def _stop(name: str, value: Any) -> tuple[str, ...]:
    return strings(name, [value] if isinstance(value, str) else value, MAX_STOP_STRINGS, MAX_STOP_LENGTH)


def _stop_token_ids(name: str, value: Any) -> tuple[int, ...]:
    return token_ids(name, () if value is None else value, MAX_STOP_TOKENS)


def _bad_words(name: str, value: Any) -> tuple[str, ...]:
    words = strings(name, value, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
    if not all(word.strip() for word in words):
        raise refuse(name, words, "words that are more than spaces")
    return words


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise refuse(name, value, "an object of token ids and numbers")
    ids = token_ids(name, list(value))
    return dict(zip(ids, (number(name, item, -100, 100) for item in value.values()), strict=True))


def _allowed_token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = token_ids(name, value)
    if not ids:
        raise RequestError(f"{name} is empty, so no token could be chosen; name at least one", param=name)
    return ids


def _truncate(name: str, value: Any) -> int:
    if integer(name, value, -1, _INT32, ", not 0 (-1 keeps as many as the model takes)") == 0:
        raise refuse(name, value, "at least 1 token, or -1 for as many as the model takes")
    return int(value)


_CHECKS = {
    "n": _within(integer, 1, MAX_CHOICES),
    "best_of": _optional(_within(integer, 1, MAX_CHOICES)),
    "presence_penalty": _within(number, -2, 2),
    "frequency_penalty": _within(number, -2, 2),
    "repetition_penalty": _within(number, 0.01, 100, " (1 is no penalty)"),
    "temperature": _temperature,
    "top_p": _positive(1),
    "top_k": _top_k,
    "min_p": _within(number, 0, 1),
    "seed": _optional(_within(integer, -(2**63), 2**63 - 1)),
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "bad_words": _bad_words,
    "include_stop_str_in_output": flag,
    "ignore_eos": flag,
    "max_tokens": _optional(_within(integer, 0, _INT32)),
    "min_tokens": _within(integer, 0, _INT32),
    "logprobs": _optional(_logprobs),
    "prompt_logprobs": _optional(_logprobs),
    "detokenize": flag,
    "skip_special_tokens": flag,
    "spaces_between_special_tokens": flag,
    "logit_bias": _optional(_logit_bias),
    "allowed_token_ids": _optional(_allowed_token_ids),
    "truncate_prompt_tokens": _optional(_truncate),
}
