"""Conversations of several tenants, drawn from a seed: who talks when, how long, and what about."""

import random
from dataclasses import dataclass

WORDS = "time person year way day thing man world life hand part child eye place work week case point company fact"


@dataclass(frozen=True)
class Turn:
    """What a user writes, after thinking for so long about the answer before."""

    think: float  # seconds
    text: str
    output_len: int  # tokens of the answer


@dataclass(frozen=True)
class Session:
    """A conversation; all of a tenant's begin with the same instructions."""

    name: str
    tenant: int
    start: float  # seconds
    system: str
    turns: list[Turn]


def sessions(
    seed: int = 0,
    *,
    tenants: int = 4,
    count: int = 32,
    turns: tuple[int, int] = (3, 8),
    system_len: tuple[int, int] = (600, 1800),
    turn_len: tuple[int, int] = (150, 700),
    output_len: tuple[int, int] = (16, 48),
    think: float = 2.0,
    over: float = 20.0,
) -> list[Session]:
    """Sessions that start within `over` seconds, lengths in characters (and tokens of answers) between the two given.

    Tenants are of unequal size, as they are: the i-th has a weight of 1/i. Thinking takes `think` seconds on average.
    """
    rng = random.Random(seed)
    systems = [f"You work for tenant {i}. " + _text(rng, rng.randint(*system_len)) for i in range(tenants)]
    drawn = []
    for number in range(count):
        tenant = rng.choices(range(tenants), [1 / (i + 1) for i in range(tenants)])[0]
        talk = [
            Turn(rng.expovariate(1 / think), _text(rng, rng.randint(*turn_len)), rng.randint(*output_len))
            for _ in range(rng.randint(*turns))
        ]
        drawn.append(Session(f"s{number}", tenant, rng.uniform(0, over), systems[tenant], talk))
    return sorted(drawn, key=lambda session: session.start)


def _text(rng: random.Random, length: int) -> str:
    words = WORDS.split()
    text = ""
    while len(text) < length:
        text += rng.choice(words) + " "
    return text[:length]
