"""Text to tokens and back, the same for every kind of checkpoint."""

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from jaxserve.errors import RequestError
from jaxserve.text import chat_messages
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.jinja_environment import refusal
from jaxserve.text.special_text import SpecialText, defusing, is_defused, is_markup, without_marks
from jaxserve.text.token_bytes import TokenBytes

RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"}
LONG = 8192  # characters from which on other threads run meanwhile: `encode` would hold the GIL, a batch does not


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
        self._added = backend.get_added_tokens_decoder()
        self._special = frozenset(index for index, token in self._added.items() if token.special)
        # Only then could a normalizer (of case, of width) turn other text into a special token.
        self._normalizes_special = backend.normalizer is not None and any(
            token.special and token.normalized for token in self._added.values()
        )
        self._bytes = TokenBytes(backend)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest token; the model's own vocabulary may be padded beyond it."""
        return max(
            [self.backend.get_vocab_size(with_added_tokens=True), *(index + 1 for index in self._added)]
        )

    @property
    def bos_token_id(self) -> int | None:
        bos = self.named_tokens.get("bos_token")
        return None if bos is None else self.backend.token_to_id(bos)

    @property
    def strips_leading_space(self) -> bool:
        """Whether a text's first space is an artefact of the vocabulary (SentencePiece with a dummy prefix)."""
        return self._bytes.strips_leading_space

    def with_chat_template(self, source: str) -> "Tokenizer":
        """The same tokenizer with another default template, trusted as the checkpoint's own are.

        For templates from whoever runs the server or the program; one from a request goes to `encode_chat`.
        """
        templates = self.chat_template.templates if self.chat_template else {}
        return Tokenizer(
            self.backend,
            named_tokens=self.named_tokens,
            eos_token_ids=self.eos_token_ids,
            chat_template=ChatTemplate({**templates, "default": source}, self.named_tokens),
        )

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Tokens of `text`; `add_special_tokens` puts BOS (and the like) around it if the model wants that.

        With `allow_special=False` the text of a special token is text like any other.
        """
        if allow_special:
            return _ids(self.backend, text, add_special_tokens)
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

        `template` is the name of one of the model's templates or a template itself, which is then rendered
        in a process of its own under limits (`with_chat_template` has none and is faster). Text from messages, tools
        and `template_kwargs` never becomes a special token, unless `special_in_content`. BOS is the
        template's to write. RequestError carries a template's own words when it refuses.
        """
        chat = self.chat_template or ChatTemplate({}, self.named_tokens)
        if template is None and not chat.templates:
            raise refusal(
                "this model has no chat template; complete a plain prompt instead, or send a chat_template"
            )
        variables = _variables(tools, template_kwargs, add_generation_prompt, continue_final_message)
        source = chat.source(template, tools=bool(tools))
        _refuse_unread(template_kwargs or {}, source)
        parts, developer = chat.takes_parts(source), "developer" in source
        prepared = chat_messages.prepare(messages, parts=parts, developer=developer)
        if not special_in_content:
            prepared = [self._defuse_message(message) for message in prepared]
            variables = self._special_text.defuse_all(variables)
        if continue_final_message:
            chat_messages.mark_end(prepared)
        text = chat.render(source, {**variables, "messages": prepared})
        if continue_final_message:
            text = chat_messages.cut_at_mark(text)
        if not text:
            raise refusal("the chat template writes nothing for these messages")
        if special_in_content:
            return _ids(self.backend, text, add_special_tokens=False), text
        return self._encode_defused(text, add_special_tokens=False), without_marks(text)

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

    def is_special(self, token_id: int) -> bool:
        """Whether this is a control token, which decoding leaves out."""
        return token_id in self._special

    def save(self, folder: str | Path) -> None:
        """Writes the Hugging Face files from which `load_tokenizer` makes the same tokenizer."""
        folder = Path(folder)
        self.backend.save(str(folder / "tokenizer.json"))
        templates = dict(self.chat_template.templates) if self.chat_template else {}
        listed = [{"name": name, "template": source} for name, source in templates.items()]
        config = {**self.named_tokens, "tokenizer_class": "PreTrainedTokenizerFast"}
        if listed:
            config["chat_template"] = listed
        for name, content in {
            "tokenizer_config.json": config,
            "generation_config.json": {"eos_token_id": list(self.eos_token_ids)},
        }.items():
            (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")

    def _encode_defused(self, text: str, add_special_tokens: bool) -> list[int]:
        defused = self._normalizes_special or is_defused(text)
        return _ids(self._defusing if defused else self.backend, text, add_special_tokens)

    def _defuse_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """What users and tools say must not write a template's other markers (such as <tool_response>) either.

        The model itself writes those, and whoever writes the system message may explain them.
        """
        trusted = message["role"] in chat_messages.TRUSTED_ROLES
        text = self._special_text if trusted else self._template_text
        return {key: value if key == "role" else text.defuse_all(value) for key, value in message.items()}

    @functools.cached_property
    def _special_text(self) -> SpecialText:
        return SpecialText(token.content for token in self._added.values() if token.special)

    @functools.cached_property
    def _template_text(self) -> SpecialText:
        sources = "\n".join(self.chat_template.templates.values()) if self.chat_template else ""
        markers = {
            token.content
            for token in self._added.values()
            if is_markup(token.content) and token.content in sources
        }
        return SpecialText(self._special_text.spellings | markers)

    @functools.cached_property
    def _defusing(self) -> Backend:
        return defusing(self.backend, self._template_text.spellings)


def _ids(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
    try:
        if len(text) < LONG:
            return backend.encode(text, add_special_tokens=add_special_tokens).ids
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    except TypeError as why:
        raise RequestError("the text is not valid Unicode: it holds half of a surrogate pair") from why


def _refuse_unread(template_kwargs: Mapping[str, Any], source: str) -> None:
    """A variable that the template never mentions would do nothing."""
    unread = [name for name in template_kwargs if not re.search(rf"\b{re.escape(name)}\b", source)]
    if unread:
        raise RequestError(
            f"this model's chat template does not read {', '.join(sorted(unread))}; take it out of "
            "chat_template_kwargs",
            param="chat_template_kwargs",
        )


def _variables(
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> dict[str, Any]:
    """What the template sees beside the messages."""
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message goes on inside the last message, so add_generation_prompt must be false",
            param="continue_final_message",
        )
    given = dict(template_kwargs or {})
    if taken := sorted(RESERVED & given.keys()):
        raise RequestError(
            f"chat_template_kwargs must not set {', '.join(taken)}: these come from the request and the model",
            param="chat_template_kwargs",
        )
    return {**given, "tools": list(tools) if tools else None, "add_generation_prompt": add_generation_prompt}
