"""What every scheme finds: weights made of several stored tensors, and the modules that were left alone."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.weights.checkpoint import Checkpoint
from pallas_kernels.formats import QTensor

Parts = Mapping[str, np.ndarray]  # a weight's tensors, each by the end of its name
IGNORED = ("ignore", "modules_to_not_convert", "exclude_modules", "llm_int8_skip_modules")


@dataclass(frozen=True)
class Weight:
    """One quantised weight: the tensors that it is made of, and what they amount to."""

    parts: Mapping[
        str, str
    ]  # the end of a name, ".weight_scale" say, to the name in the checkpoint; codes first
    shape: tuple[int, ...]
    unpack: Callable[[Parts], QTensor | np.ndarray]
    low_bit: bool = True  # `unpack` gives a QTensor
    swapped: bool = False  # `shape` is [..., in, out], and what `unpack` gives [..., out, in]
    columns: Callable[[np.ndarray, Parts], np.ndarray] | None = None  # puts the dequantised ones in order


@dataclass(frozen=True)
class Stored:
    """A checkpoint of quantised weights as its files have it, and what its config says of them."""

    checkpoint: Checkpoint
    settings: Mapping[str, Any]

    @cached_property
    def names(self) -> dict[str, None]:
        """In the order of the files."""
        return dict.fromkeys(self.checkpoint.names())

    def find(self, codes: str, *others: str) -> Iterator[tuple[str, dict[str, str]]]:
        """(what stands before `codes`, {end: name}) of each name that ends so, with the `others` that are there."""
        for name in self.names:
            if name.endswith(codes):
                base = name.removesuffix(codes)
                yield base, {codes: name} | {end: base + end for end in others if base + end in self.names}

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.shape(name)

    def dtype(self, name: str) -> np.dtype:
        return self.checkpoint.dtype(name)

    def refuse(self, problem: str, *, tensor: str = "", expected: Any, found: Any) -> CheckpointError:
        file = self.checkpoint.file(tensor) if tensor else self.checkpoint.path
        return CheckpointError(problem, tensor=tensor, file=file, expected=str(expected), found=str(found))

    def require(self, key: str, *expected: Any) -> None:
        """Refuse a setting of another value; absent will do if None is among `expected`."""
        if (found := self.settings.get(key)) not in expected:
            raise self.refuse(
                f"weights are quantised with a {key} that is not supported",
                expected=" or ".join(map(str, expected)), found=found,
            )  # fmt: skip

    def check_shape(self, name: str, *expected: tuple[int, ...]) -> None:
        """Refuse a tensor of none of these shapes."""
        if self.shape(name) not in expected:
            raise self.refuse(
                "a part of a quantised weight has the wrong shape",
                tensor=name, expected=" or ".join(str(list(shape)) for shape in expected),
                found=list(self.shape(name)),
            )  # fmt: skip

    def check_parts(self, parts: Mapping[str, str], *needed: str) -> None:
        """Refuse a quantised weight, one of `find`'s, without all of these."""
        if any(end not in parts for end in needed):
            raise self.refuse(
                "a part is missing",
                tensor=next(iter(parts.values())), expected=" and ".join(needed), found=", ".join(parts),
            )  # fmt: skip

    def check_converted(self, module: str) -> None:
        """Refuse quantised parts of a module that the config says was left alone."""
        for pattern in (p for key in IGNORED for p in self.settings.get(key) or ()):
            if matches(pattern, module):
                raise self.refuse(
                    f"config.json lists {pattern!r} as not quantised, but {module} is stored with scales",
                    expected="plain weights", found="quantised ones",
                )  # fmt: skip


def matches(pattern: str, module: str) -> bool:
    """Whether an entry of an ignore list means this module.

    After "re:" a regular expression for the beginning of its name (compressed-tensors); otherwise a name or a part
    of one from dot to dot, * standing for anything (transformers, ModelOpt).
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return any(fnmatchcase(f".{module}.", f"*.{pattern}.{rest}") for rest in ("", "*"))


def floats(array: np.ndarray) -> np.ndarray:
    """Scales in float32, whatever they are stored as."""
    return np.asarray(array).astype(np.float32)


def unpack_bits(words: np.ndarray, bits: int) -> np.ndarray:
    """[..., n] int32 -> [..., n * 32 / bits] uint8, the lowest bits first."""
    places = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (np.ascontiguousarray(words).view(np.uint32)[..., None] >> places) & np.uint32(2**bits - 1)
    return codes.astype(np.uint8).reshape(*words.shape[:-1], -1)


def group_size(stored: Stored, scales: str, groups: int, columns: int) -> int:
    """Consecutive columns that share a scale, as the settings have it; the last group may be cut by the edge."""
    group = stored.settings.get("group_size") or -1
    group = columns if group == -1 else group
    if -(-columns // group) != groups:
        raise stored.refuse(
            f"the number of groups does not fit group_size {group}",
            tensor=scales, expected=-(-columns // group), found=groups,
        )  # fmt: skip
    return group


def kept_dtype(array: np.ndarray) -> Any:
    """The dtype that a format keeps scales of this one in: what is narrow stays so."""
    narrow = {np.dtype(np.float16): jnp.float16, np.dtype(jnp.bfloat16): jnp.bfloat16}
    return narrow.get(array.dtype, jnp.float32)


def group_order(groups: np.ndarray, group: int) -> np.ndarray:
    """Which input comes where when those of a group lie together (activation order, arXiv:2210.17323)."""
    if not np.array_equal(np.sort(groups), np.arange(len(groups)) // group):
        raise ValueError(f"g_idx does not divide the inputs into groups of {group}")
    return np.argsort(groups, kind="stable")


def in_order(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Columns that lie group by group, back where the layer's inputs are."""
    out = np.empty_like(values)
    out[:, np.argsort(groups, kind="stable")] = values
    return out


def pack_pairs(codes: np.ndarray) -> np.ndarray:
    """Codes of 4 bits, two a byte, the even column's in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
