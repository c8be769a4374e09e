"""What bytes each token stands for, by the rules of the vocabulary's own decoder."""

import json
import re
from typing import Any

from tokenizers import Tokenizer as Backend

from jaxserve.errors import CheckpointError

SPACE = "\u2581"  # how SentencePiece writes a space
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's bijection: printable Latin-1 stands for itself, the other bytes for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


ALPHABET = _byte_alphabet()


class TokenBytes:
    """`token_bytes[id]`, worked out when first asked; ids beyond the vocabulary stand for nothing."""

    def __init__(self, backend: Backend):
        self.backend = backend
        self.added = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}
        steps = _steps(json.loads(backend.decoder.__getstate__()) if backend.decoder else None)
        kinds = {step["type"] for step in steps}
        self.byte_level = "ByteLevel" in kinds
        self.byte_tokens = "ByteFallback" in kinds
        self.replaced = _replaced(steps)
        self.strips_leading_space = not self.byte_level and _strips(steps)
        unknown = kinds - {"ByteLevel", "ByteFallback", "Fuse", "Strip", "Replace", "Metaspace"}
        if unknown or not kinds:
            raise CheckpointError(
                "this tokenizer decodes in a way that is not supported",
                expected="a ByteLevel, Metaspace or ByteFallback decoder", found=", ".join(sorted(unknown)) or "none",
            )  # fmt: skip
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._work_out(token_id)
        return known

    def _work_out(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self.byte_level:
            if token_id in self.added or any(character not in ALPHABET for character in token):
                return token.encode()
            return bytes(ALPHABET[character] for character in token)
        if self.byte_tokens and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for pattern, content in self.replaced:
            token = token.replace(pattern, content)
        return token.encode()


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A decoder's steps in order, sequences unfolded."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


def _replaced(steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    replaced = []
    for step in steps:
        if step["type"] == "Replace":
            if "String" not in step["pattern"]:
                raise CheckpointError(
                    "this tokenizer's decoder replaces by a regular expression, which is not supported",
                    expected="a plain string", found=str(step["pattern"]),
                )  # fmt: skip
            replaced.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Metaspace":
            replaced.append((step["replacement"], " "))
    return replaced


def _strips(steps: list[dict[str, Any]]) -> bool:
    return any(
        (step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
