"""Tokens to text as they come: whole characters only, each exactly once."""

import codecs
from collections.abc import Iterable, Sequence

from jaxserve.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4  # bytes of UTF-8


class Detokenizer:
    """The text of tokens that continue a prompt, in constant time per token.

    All pieces joined are what decoding prompt and tokens together adds to decoding the prompt. A character
    begun by the prompt's last tokens and finished here is given whole. Bytes that are no UTF-8 become U+FFFD, as
    in `Tokenizer.decode`. No decoder that is supported puts spaces between special tokens, so
    `spaces_between_special_tokens` (which slow tokenizers of transformers heed) makes no difference.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = self._tail(prompt_ids)
        self._decoder.decode(tail)
        self._borrowed: bytes = self._decoder.getstate()[0]  # the prompt's share of the first character
        self._strip = tokenizer.strips_leading_space and not tail

    def push(self, ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        pieces = b"".join(map(self._bytes, ids))
        return self._settle(pieces, self._decoder.decode(pieces))

    def flush(self) -> str:
        """What is left at the end: at most one character that was never finished, as U+FFFD."""
        return self._settle(b"", self._decoder.decode(b"", final=True))

    def _bytes(self, token: int) -> bytes:
        if self.skip_special_tokens and self.tokenizer.is_special(token):
            return b""
        return self.tokenizer.token_bytes(token)

    def _tail(self, prompt_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes, enough to know whether it ends inside a character."""
        tail = b""
        for token in reversed(prompt_ids):
            tail = self._bytes(token) + tail
            if len(tail) >= LONGEST_CHARACTER:
                break
        return tail

    def _settle(self, pieces: bytes, text: str) -> str:
        """Takes from the first text what is not the output's own."""
        if text and self._borrowed:
            # The prompt's unfinished character was never finished: its U+FFFD belongs to the prompt.
            if text[0] == REPLACEMENT and not (self._borrowed + pieces).startswith(REPLACEMENT.encode()):
                text = text[1:]
            self._borrowed = b""
        if text and self._strip:
            text, self._strip = text.removeprefix(" "), False
        return text
