"""Admission: the host's side of filling a slot, and the refusal of requests that leave no token to choose."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxserve.errors import RequestError
from jaxserve.sampling.checks import shown
from jaxserve.sampling.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_TOKENS, SamplingParams

PAST_LENGTH = MAX_BAD_WORD_TOKENS - 1  # tokens before a bad word's last one


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Admission:
    """One slot's row of each array of SlotState that `admit` sets."""

    marks: np.ndarray | jax.Array
    bias: np.ndarray | jax.Array
    stop_ids: np.ndarray | jax.Array
    bad_past: np.ndarray | jax.Array
    bad_last: np.ndarray | jax.Array
    recent: np.ndarray | jax.Array


def encode_bad_words(params: SamplingParams, encode: Callable[[str], Sequence[int]]) -> list[tuple[int, ...]]:
    """The token sequences that spell the bad words, at the start of a text and after a space.

    `encode` gives a text's tokens without special ones. A word of more than MAX_BAD_WORD_TOKENS is refused.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        for text in (word.lstrip(), " " + word.lstrip()):
            sequence = tuple(encode(text))
            if len(sequence) > MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"bad_words has {shown(word)}, which is {len(sequence)} tokens long; "
                    f"use words of at most {MAX_BAD_WORD_TOKENS} tokens",
                    param="bad_words",
                )
            if sequence:
                sequences[sequence] = None
    return list(sequences)


def check_possible(
    params: SamplingParams,
    vocab_size: int,
    bad_words: Sequence[Sequence[int]] = (),
    eos_token_ids: Sequence[int] = (),
) -> None:
    """Refuse a request whose masks together leave no token of the vocabulary to choose.

    What only shows while generating (the last allowed token would end a bad word) is no error: see `shape`.
    """
    stops = stop_tokens(params, eos_token_ids)
    if params.min_tokens and len(stops) > MAX_STOP_TOKENS:
        raise RequestError(
            f"stop_token_ids and the model's {len(eos_token_ids)} end-of-sequence tokens are {len(stops)} tokens, "
            f"and min_tokens can hold back {MAX_STOP_TOKENS}; name fewer",
            param="stop_token_ids",
        )
    banned = {sequence[0] for sequence in bad_words if len(sequence) == 1}
    if _none_left(params, vocab_size, banned):
        raise RequestError(
            "bad_words bans every token that may be chosen; ban fewer, or allow more in allowed_token_ids",
            param="bad_words",
        )
    if params.min_tokens and _none_left(params, vocab_size, banned.union(stops)):
        raise RequestError(
            f"min_tokens={params.min_tokens} cannot be reached: every token that may be chosen is a stop token, the "
            "end of sequence or a bad word; use min_tokens=0, or allow more in allowed_token_ids",
            param="min_tokens",
        )


def admission(
    params: SamplingParams,
    tokens: Sequence[int],
    n_prompt: int,
    vocab_size: int,
    bad_words: Sequence[Sequence[int]] = (),
    eos_token_ids: Sequence[int] = (),
) -> Admission:
    """What `admit` needs: `tokens` are the prompt's `n_prompt` and then what was generated, after a preemption."""
    counts = np.bincount(np.asarray(tokens[n_prompt:], np.int64), minlength=vocab_size)[:vocab_size]
    marks = (2 * np.minimum(counts, 2**14 - 1)).astype(np.int16)
    marks[np.asarray(tokens[:n_prompt], np.int64)] |= 1
    stop_ids = np.full(MAX_STOP_TOKENS, -1, np.int32)
    stops = stop_tokens(params, eos_token_ids)[:MAX_STOP_TOKENS]
    stop_ids[: len(stops)] = stops
    recent = np.full(PAST_LENGTH, -1, np.int32)
    newest = tokens[max(n_prompt, len(tokens) - PAST_LENGTH) :]
    recent[PAST_LENGTH - len(newest) :] = newest
    bad_past, bad_last = _bad_word_arrays(bad_words)
    return Admission(marks, _bias(params, vocab_size), stop_ids, bad_past, bad_last, recent)


def stop_tokens(params: SamplingParams, eos_token_ids: Sequence[int]) -> list[int]:
    """The tokens that end this request's output."""
    return list(dict.fromkeys([*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids]))


def _none_left(params: SamplingParams, vocab_size: int, banned: set[int]) -> bool:
    if params.allowed_token_ids is not None:
        return banned.issuperset(params.allowed_token_ids)
    return len(banned) >= vocab_size


def _bias(params: SamplingParams, vocab_size: int) -> np.ndarray:
    if params.allowed_token_ids is None:
        bias = np.zeros(vocab_size, np.float32)
    else:
        bias = np.full(vocab_size, -np.inf, np.float32)
        bias[list(params.allowed_token_ids)] = 0
    if params.logit_bias:
        bias[list(params.logit_bias)] = list(params.logit_bias.values())
    return bias


def _bad_word_arrays(bad_words: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    past = np.full((2 * MAX_BAD_WORDS, PAST_LENGTH), -1, np.int32)
    last = np.full(2 * MAX_BAD_WORDS, -1, np.int32)
    for i, word in enumerate(bad_words):
        past[i, PAST_LENGTH - len(word) + 1 :] = word[:-1]
        last[i] = word[-1]
    return past, last
