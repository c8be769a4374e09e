"""Text that spells a special token, kept from becoming one.

A mark is put inside every such spelling. The mark travels through the chat template with the rest of the text,
keeps the tokenizer from seeing the special token, and is taken out again by the tokenizer's own normalizer. So
the tokens are those of the same text with special tokens off, and text that spells none is not touched at all.
"""

import functools
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Tokenizer, normalizers

MARK = "\ufdd0"  # a noncharacter: Unicode reserves it for such inside use
PLAIN = re.compile(r"[\w\s.$-]*")  # such text can only be a special token as a whole, never finish one


class SpecialText:
    """Knows the spellings of tokens that text must not become."""

    def __init__(self, spellings: Iterable[str]):
        self.spellings = frozenset(spelling for spelling in spellings if len(spelling) > 1)

    def defuse(self, text: str) -> str:
        """`text` with a mark inside every spelling, and at its ends where template text could complete one."""
        if not self.spellings:
            return text
        bare = text.strip()
        head = any(bare[:n] in self._endings for n in range(1, min(self._longest, len(bare)) + 1))
        inner = (
            len(bare) < self._longest and not PLAIN.fullmatch(bare) and any(bare in s for s in self.spellings)
        )
        tail = any(bare[-n:] in self._beginnings for n in range(1, min(self._longest, len(bare)) + 1))
        marked = self._spelled.sub(rf"\1{MARK}", bare)
        if not (head or inner or tail) and marked == bare:
            return text
        before, after = MARK if head or inner else "", MARK if tail else ""
        start = text.index(bare)
        return f"{text[:start]}{before}{marked}{after}{text[start + len(bare) :]}"

    def defuse_all(self, value: Any) -> Any:
        """The same for every string in a JSON value, keys too."""
        if isinstance(value, str):
            return self.defuse(value)
        if isinstance(value, list | tuple):
            return [self.defuse_all(item) for item in value]
        if isinstance(value, dict):
            return {self.defuse_all(key): self.defuse_all(item) for key, item in value.items()}
        return value

    @functools.cached_property
    def _spelled(self) -> re.Pattern[str]:
        """The first character of each spelling; looking ahead finds overlapping ones too."""
        return re.compile(f"(?=(?:{'|'.join(map(re.escape, sorted(self.spellings)))}))(.)", re.DOTALL)

    @functools.cached_property
    def _longest(self) -> int:
        return max(map(len, self.spellings), default=0)

    @functools.cached_property
    def _beginnings(self) -> frozenset[str]:
        parts = (spelling[:cut] for spelling in self.spellings for cut in range(1, len(spelling)))
        return frozenset(part for part in parts if not PLAIN.fullmatch(part))

    @functools.cached_property
    def _endings(self) -> frozenset[str]:
        parts = (spelling[cut:] for spelling in self.spellings for cut in range(1, len(spelling)))
        return frozenset(part for part in parts if not PLAIN.fullmatch(part))


def is_markup(token: str) -> bool:
    """Whether a token looks like a marker that templates write, not like words or white space."""
    return not PLAIN.fullmatch(token)


def is_defused(text: str) -> bool:
    return MARK in text


def without_marks(text: str) -> str:
    return text.replace(MARK, "")


def defusing(backend: Tokenizer, spellings: frozenset[str]) -> Tokenizer:
    """A tokenizer that shares the vocabulary and removes the marks after looking for added tokens.

    Tokens of these spellings are looked for in the text as given, before any normalizer could bring one about.
    """
    twin = Tokenizer(backend.model)
    added = backend.get_added_tokens_decoder()
    twin.add_tokens(
        [
            AddedToken(
                token.content,
                special=token.special,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized and token.content not in spellings,
            )
            for _, token in sorted(added.items())
        ]
    )
    unmark = normalizers.Replace(MARK, "")
    twin.normalizer = normalizers.Sequence([unmark, backend.normalizer]) if backend.normalizer else unmark
    if backend.pre_tokenizer:
        twin.pre_tokenizer = backend.pre_tokenizer
    if backend.post_processor:
        twin.post_processor = backend.post_processor
    return twin
