"""Text to tokens and back, the same for every kind of checkpoint."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from jaxserve.errors import RequestError
from jaxserve.text import chat_messages
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.special_text import SpecialText, defusing, is_defused, without_marks
from jaxserve.text.token_bytes import TokenBytes

CONTINUE = "\ufdd1 "  # ends the message to continue; the space tells whether the template trims


class Tokenizer:
    """A vocabulary with its rules, special tokens and chat template; safe to use from several threads."""

    def __init__(
        self,
        backend: Backend,
        *,
        named_tokens: Mapping[str, Any] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
    ):
        """`named_tokens` are bos_token, eos_token, ... as chat templates see them."""
        self.backend = backend
        self.named_tokens = dict(named_tokens or {})
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self._special = frozenset(index for index, token in added.items() if token.special)
        self._bytes = TokenBytes(backend)
        self._special_text = SpecialText(token.content for token in added.values() if token.special)

    @property
    def bos_token_id(self) -> int | None:
        bos = self.named_tokens.get("bos_token")
        return None if bos is None else self.backend.token_to_id(bos)

    @property
    def strips_leading_space(self) -> bool:
        """Whether a text's first space is an artefact of the vocabulary (SentencePiece with a dummy prefix)."""
        return self._bytes.strips_leading_space

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Tokens of `text`; `add_special_tokens` puts BOS (and the like) around it if the model wants that.

        With `allow_special=False` the text of a special token is text like any other.
        """
        if allow_special:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self._encode_defused(self._special_text.defuse(text), add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        special_in_content: bool = False,
    ) -> tuple[list[int], str]:
        """Tokens and text of a conversation, written by the model's chat template.

        `template` is the name of one of the model's templates or a template itself. Text from messages, tools
        and `template_kwargs` never becomes a special token, unless `special_in_content`. BOS is the
        template's to write.
        """
        chat = self.chat_template or ChatTemplate({}, self.named_tokens)
        if template is None and not chat.templates:
            raise RequestError(
                "this model has no chat template; complete a plain prompt instead, or send `chat_template`",
                param="messages", code="invalid_chat",
            )  # fmt: skip
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message goes on inside the last message, so add_generation_prompt must be false",
                param="continue_final_message",
            )  # fmt: skip
        source = chat.source(template, tools=bool(tools))
        variables = {"tools": list(tools) if tools else None, **(template_kwargs or {})}
        prepared = chat_messages.prepare(messages, parts=chat.takes_parts(source), developer="developer" in source)
        if not special_in_content:
            prepared, variables = self._special_text.defuse_all([prepared, variables])
        if continue_final_message:
            chat_messages.append_to_last(prepared, CONTINUE)
        text = chat.render(source, prepared, {**variables, "add_generation_prompt": add_generation_prompt})
        if continue_final_message:
            text = chat_messages.cut_at(text, CONTINUE)
        if special_in_content:
            return self.backend.encode(text, add_special_tokens=False).ids, text
        return self._encode_defused(text, add_special_tokens=False), without_marks(text)

    def _encode_defused(self, text: str, add_special_tokens: bool) -> list[int]:
        backend = self._defusing if is_defused(text) else self.backend
        return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens; bytes that are no UTF-8 become U+FFFD, and ids beyond the vocabulary nothing."""
        shown = (i for i in ids if not (skip_special_tokens and i in self._special))
        text = b"".join(map(self._bytes.__getitem__, shown)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for: part of a character, perhaps. Empty beyond the vocabulary."""
        return self._bytes[token_id]

    def id_to_token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it."""
        return self.backend.id_to_token(token_id) if token_id >= 0 else None

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    @functools.cached_property
    def _defusing(self) -> Backend:
        return defusing(self.backend, self._special_text.spellings)
