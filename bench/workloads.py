"""What a benchmark sends and when: prompts at random or from a file, arrivals at random or evenly spaced."""

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError


@dataclass(frozen=True)
class Work:
    """One request: text or token ids to go on from, and how many tokens to make."""

    prompt: str | list[int]
    output_len: int
    extra: dict[str, Any] = field(default_factory=dict)  # more fields of the request's body


def random_works(
    count: int, input_len: int, output_len: int, *, vocab_size: int, range_ratio: float = 0.0, seed: int = 0
) -> list[Work]:
    """Random token ids, lengths uniform in `len * (1 ± range_ratio)`.

    The ids are from the middle nine tenths of the vocabulary: special tokens sit at its ends.
    """
    rng = random.Random(seed)

    def around(length: int) -> int:
        return max(
            1, rng.randint(math.floor(length * (1 - range_ratio)), math.ceil(length * (1 + range_ratio)))
        )

    low, high = vocab_size // 20, vocab_size - vocab_size // 20 - 1
    return [
        Work([rng.randint(low, high) for _ in range(around(input_len))], around(output_len))
        for _ in range(count)
    ]


def file_works(path: str, count: int, output_len: int) -> list[Work]:
    """Lines of `{"prompt": text or token ids, "output_len": n, ...}`; begun anew when they are too few.

    Other fields go into the request's body as they are.
    """
    works = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            works.append(Work(row.pop("prompt"), row.pop("output_len", output_len), row))
        except (json.JSONDecodeError, KeyError, AttributeError):
            raise ConfigError(f'{path}:{number} is not {{"prompt": ..., "output_len": ...}}') from None
    if not works:
        raise ConfigError(f"{path} holds no request")
    return [works[i % len(works)] for i in range(count)]


def arrivals(count: int, rate: float, *, fixed: bool = False, seed: int = 0) -> list[float]:
    """Seconds after the start at which each request arrives: a Poisson process, or evenly spaced."""
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += 1 / rate if fixed else rng.expovariate(rate)
    return times
