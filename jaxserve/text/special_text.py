"""Text that spells a special token, kept from becoming one.

A mark is put inside every such spelling. The mark travels through the chat template with the rest of the text,
keeps the tokenizer from seeing the special token, and is taken out again by the tokenizer's own normalizer. So
the tokens are those of the same text with special tokens off, and text that spells none is not touched at all.
"""

import functools
import re
from collections.abc import Iterable, Mapping
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
        marked = self._first.sub(self._mark, text)
        bare = text.strip()
        sizes = range(1, min(self._lengths[-1], len(bare)) + 1)
        if self._inside(bare) or any(bare[:size] in self._endings for size in sizes):
            body = marked.lstrip()  # inside the white space, which templates may trim
            marked = marked[: len(marked) - len(body)] + MARK + body
        if any(bare[-size:] in self._beginnings for size in sizes):
            body = marked.rstrip()
            marked = body + MARK + marked[len(body) :]
        return marked

    def defuse_all(self, value: Any) -> Any:
        """The same for every string in a JSON value, keys too."""
        if isinstance(value, str):
            return self.defuse(value)
        if isinstance(value, list | tuple):
            return [self.defuse_all(item) for item in value]
        if isinstance(value, Mapping):
            return {self.defuse_all(key): self.defuse_all(item) for key, item in value.items()}
        return value

    def _mark(self, found: re.Match[str]) -> str:
        """The first character of a spelling with a mark after it; overlapping spellings each get their own."""
        at, text = found.start(), found.string
        spelled = any(text[at : at + length] in self.spellings for length in self._lengths)
        return found[0] + MARK if spelled else found[0]

    def _inside(self, bare: str) -> bool:
        """Whether a whole text is the inner part of a spelling, as in `'<' ~ text ~ '>'`."""
        return (
            len(bare) < self._lengths[-1]
            and is_markup(bare)
            and any(bare in spelling for spelling in self.spellings)
        )

    @functools.cached_property
    def _first(self) -> re.Pattern[str]:
        return re.compile(f"[{re.escape(''.join({spelling[0] for spelling in self.spellings}))}]")

    @functools.cached_property
    def _lengths(self) -> list[int]:
        return sorted({len(spelling) for spelling in self.spellings})

    @functools.cached_property
    def _beginnings(self) -> frozenset[str]:
        parts = (spelling[:cut] for spelling in self.spellings for cut in range(1, len(spelling)))
        return frozenset(filter(is_markup, parts))

    @functools.cached_property
    def _endings(self) -> frozenset[str]:
        parts = (spelling[cut:] for spelling in self.spellings for cut in range(1, len(spelling)))
        return frozenset(filter(is_markup, parts))


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
