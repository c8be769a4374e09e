"""What one field of a request may hold: each check gives the value in plain form, or refuses it by name."""

import math
import reprlib
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from jaxserve.errors import RequestError


def refuse(name: str, value: Any, expected: str) -> RequestError:
    """The error for a field that holds `value` where `expected` was wanted."""
    return RequestError(f"{name} is {shown(value)}; use {expected}", param=name)


def shown(value: Any) -> str:
    """A value as an error may show it: short, whatever the user sent."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    try:
        return reprlib.repr(value)
    except Exception:  # Python refuses to print very long integers, and a user's object may raise anything
        return f"a {type(value).__name__}"


def integer(name: str, value: Any, low: int, high: int, also: str = "") -> int:
    """A whole number in [low, high]; a bool or a float is not one. `also` ends the advice."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not low <= int(value) <= high:
        raise refuse(name, value, f"an integer from {low} to {high}{also}")
    return int(value)


def number(name: str, value: Any, low: float, high: float, also: str = "") -> float:
    """A finite number in [low, high]; NaN is in no range, and a bool is not a number."""
    real: Any = value if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not low <= real <= high:
        raise refuse(name, value, f"a number from {low:g} to {high:g}{also}")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """True or False, and nothing that merely counts as such."""
    if not isinstance(value, bool):
        raise refuse(name, value, "true or false")
    return value


def strings(name: str, value: Any, most: int, longest: int) -> tuple[str, ...]:
    """A list of at most `most` non-empty strings of at most `longest` characters; None is no strings."""
    expected = f"a list of at most {most} non-empty strings of at most {longest} characters"
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or len(value) > most:
        raise refuse(name, value, expected)
    for item in value:
        if not isinstance(item, str) or not 0 < len(item) <= longest:
            raise refuse(name, item, expected)
        if any("\ud800" <= char <= "\udfff" for char in item):
            raise refuse(name, item, "text: half of a surrogate pair is no character and never comes out")
    return tuple(value)


def token_ids(name: str, value: Any, most: int | None = None) -> tuple[int, ...]:
    """A list of token ids, each once; whether the vocabulary has them is `in_vocabulary`'s question."""
    limit = "" if most is None else f" at most {most}"
    if not isinstance(value, list | tuple | set | frozenset) or (most is not None and len(value) > most):
        found = value if not hasattr(value, "__len__") else f"a {type(value).__name__} of {len(value)}"
        raise refuse(name, found, f"a list of{limit} token ids")
    ids = (integer(name, item, 0, 2**31 - 1, ", a token id, in the list") for item in value)
    return tuple(dict.fromkeys(ids))


def in_vocabulary(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Refuse ids that the model does not have."""
    for item in ids:
        if item >= vocab_size:
            raise refuse(name, item, f"token ids below the model's vocabulary size, {vocab_size}")
