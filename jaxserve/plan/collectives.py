"""What a compiled step sends between devices, read from its program."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)
REMOTE = ("expert_exchange", "ring_attention")  # kernels that copy between devices themselves
BITS = {"pred": 8, "bf16": 16, "f8e4m3fn": 8, "f8e5m2": 8, "f8e8m0fnu": 8, "f4e2m1fn": 4}
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_OP = re.compile(r"= (.+?) (" + "|".join(KINDS) + r")(-start)?\(")
_KERNEL = re.compile(r"%(" + "|".join(REMOTE) + r")[\w.]* = (.+?) custom-call\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)")


@dataclass(frozen=True)
class Traffic:
    """Of one kind of collective in one step, on each device."""

    kind: str
    calls: int
    nbytes: int  # of the results; of a kernel that copies itself, room for the most that it may receive


def collectives(program: str) -> list[Traffic]:
    """The collectives that every step runs, from an optimised program's text; loops are counted as often as they turn.

    What stands under a condition is left out: those are sampling parameters and log-probabilities that most steps
    do not ask for.
    """
    computations = dict(_computations(program))
    calls: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()

    def count(name: str, times: int) -> None:
        for line in computations.get(name, ()):
            for kind, size in _sent(line):
                calls[kind] += times
                nbytes[kind] += times * size
            if " while(" in line:
                condition, body = (re.search(rf"{part}=%?([\w.-]+)", line) for part in ("condition", "body"))
                if condition and body:
                    count(body[1], times * _turns(line, condition[1], computations))
            elif " conditional(" not in line:
                for called in _CALLED.findall(line):
                    count(called, times)

    entry = re.search(r"^ENTRY %?([\w.-]+)", program, re.MULTILINE)
    if entry:
        count(entry[1], 1)
    return [Traffic(kind, calls[kind], nbytes[kind]) for kind in (*KINDS, *REMOTE) if calls[kind]]


def _sent(line: str) -> Iterator[tuple[str, int]]:
    """(kind, bytes of the result) of the collective in this line, if it is one."""
    op, kernel = _OP.search(line), _KERNEL.search(line)
    if op:
        # What is only begun names its source beside its target, which is at least as large.
        yield op[2], (max if op[3] and op[1].startswith("(") else sum)(_sizes(op[1]))
    if kernel:
        yield kernel[1], sum(_sizes(kernel[2]))


def _computations(program: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", []
    for line in program.splitlines():
        head = _HEAD.match(line)
        if head:
            name, lines = head[1], []
        elif line == "}":
            yield name, lines
        else:
            lines.append(line)


def _turns(line: str, condition: str, computations: dict[str, list[str]]) -> int:
    """How often a loop turns: as the compiler notes it, else the constant that its counter is compared with."""
    known = re.search(r'known_trip_count[^}]*?"?n"?:"?(\d+)', line)
    if known:
        return int(known[1])
    text = list(computations.get(condition, ()))
    for called in [name for inner in text for name in _CALLED.findall(inner)]:
        text += computations.get(called, ())
    limits = [int(n) for inner in text for n in re.findall(r"s32\[\][^=]* constant\((\d+)\)", inner)]
    return max(limits, default=1)


def _sizes(shapes: str) -> list[int]:
    """Bytes of every array in a result's type."""
    return [
        math.prod(int(n) for n in dims.split(",") if n) * _bits(dtype) // 8
        for dtype, dims in _ARRAY.findall(shapes)
    ]


def _bits(dtype: str) -> int:
    return BITS.get(dtype) or int(re.sub(r"\D", "", dtype) or 8)
