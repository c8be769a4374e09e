"""Text files as windows of tokens of one length: what calibration and evaluation read, through a grain pipeline."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.text import Tokenizer

DEFAULT_TEXT = Path(__file__).parent / "quantize" / "calibration.txt"


def windows(
    path: str | None, tokenizer: Tokenizer, length: int, count: int | None = None, seed: int | None = None
) -> np.ndarray:
    """int32 [n, length], at most `count`: the documents of a file one after the other, cut into equal pieces.

    `path` is a text file, which is one document, or .jsonl with one a line: {"text": ...} or {"messages": [...]}, which
    the chat template renders. None is the short text that comes with jaxserve. With a `seed` documents are shuffled.
    """
    data = grain.MapDataset.source(documents(Path(path).expanduser() if path else DEFAULT_TEXT))
    data = data if seed is None else data.shuffle(seed=seed)
    wanted = None if count is None else count * length
    tokens: list[int] = []
    for part in data.map(lambda document: _encoded(tokenizer, document)):
        tokens += part
        if wanted is not None and len(tokens) >= wanted:
            break
    found = len(tokens) // length
    if not found:
        raise ConfigError(
            f"{path or 'the default text'} has {len(tokens)} tokens, fewer than one window of {length}; "
            "give more text, or shorter windows"
        )
    found = min(found, count or found)
    return np.asarray(tokens[: found * length], np.int32).reshape(found, length)


def split(pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(three windows of four to calibrate with, the fourth ones to judge by)."""
    judged = np.arange(len(pieces)) % 4 == 3
    return pieces[~judged], pieces[judged]


def documents(path: Path) -> list[Any]:
    """Texts, or lists of messages."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as why:
        raise ConfigError(f"cannot read {path} as UTF-8 text: {why}") from None
    return list(_lines(path, text)) if path.suffix == ".jsonl" else [text]


def _lines(path: Path, text: str) -> Iterator[Any]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            yield value["text"] if "text" in value else value["messages"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f'{path}, line {number}: expected {{"text": ...}} or {{"messages": [...]}}, found {line[:60]}'
            ) from None


def _encoded(tokenizer: Tokenizer, document: Any) -> list[int]:
    if isinstance(document, str):
        return tokenizer.encode(document, allow_special=False)
    return tokenizer.encode_chat(document)[0]
