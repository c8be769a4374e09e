"""Request bodies: every field that has an effect, and the standard ones that ask for nothing; no other is let in."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from server.request_ids import PATTERN

_LATER = "is not supported yet; remove it"
_STRUCTURED = "structured output is not supported yet; remove the field, the text would not be constrained"
_TOOLS = "tool calling is not supported yet; remove the field, or send none of it"
HINTS = {  # fields that people send and that would have no effect: what they are told
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "guided_decoding_backend": _STRUCTURED,
    "structured_outputs": _STRUCTURED,
    "response_format": f'only {{"type": "text"}} is honoured; {_STRUCTURED}',
    "tools": _TOOLS,
    "tool_choice": _TOOLS,
    "tool_calls": _TOOLS,
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "parallel_tool_calls": _TOOLS,
    "modalities": 'only ["text"] can be produced',
    "audio": "sound can be neither read nor produced; remove it",
    "prediction": f"a predicted output {_LATER}",
    "reasoning_effort": f"a reasoning effort {_LATER}, or pass what the chat template takes in chat_template_kwargs",
    "thinking_token_budget": f"a thinking budget {_LATER}",
    "verbosity": f"verbosity {_LATER}; ask for it in the prompt",
    "web_search_options": "the server searches nothing; remove it",
    "store": "completions are not stored; remove it or send false",
    "service_tier": 'there is one tier; remove it or send "auto" or "default"',
    "suffix": f"text after the completion {_LATER}",
    "prompt_embeds": f"a prompt of embeddings {_LATER}",
    "use_beam_search": "beam search is not supported; use n or best_of",
    "length_penalty": "it belongs to beam search, which is not supported; remove it",
    "early_stopping": "it belongs to beam search, which is not supported; remove it",
}


class Body(BaseModel):
    """No unknown fields, no coercion of types, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="send a last chunk with the usage and no choices")
    continuous_usage_stats: bool | None = Field(
        None, description="with include_usage: the usage so far in every chunk"
    )
    include_obfuscation: Literal[False] | None = None


class Generate(Body):
    """What chat and plain completions have in common: the sampling parameters, and how to answer."""

    model: str | None = Field(None, description="a name from /v1/models; by default the first one")
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(
        None, description="token ids (as strings) and what to add to their logits"
    )
    stop: str | list[str] | None = Field(
        None, description="a string or a list of strings that end the output"
    )
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = Field(None, description="alternatives for each token of the prompt")
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        None, description="keep so many last tokens; -1: as many as the model takes"
    )
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="add the ids of prompt and output")
    return_tokens_as_token_ids: bool | None = Field(
        None, description='write tokens in logprobs as "token_id:7"'
    )
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="lower is served first")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="shares cached prefixes only with its like"
    )
    generated_token_ids: list[int] | None = Field(
        None, min_length=1, description="the answer's first tokens, made elsewhere: only what follows is sent"
    )
    request_id: str | None = Field(None, pattern=PATTERN)
    user: str | None = Field(None, description="changes nothing")
    metadata: dict[str, str] | None = Field(None, description="changes nothing")
    safety_identifier: str | None = Field(None, description="changes nothing")
    prompt_cache_key: str | None = Field(
        None, description="changes nothing: equal prefixes are always shared"
    )
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        wrong = [key for key in bias or () if not (key.isascii() and key.isdigit() and len(key) < 10)]
        if wrong:
            raise ValueError(f"the key {wrong[0]!r} is not a token id")
        return bias

    @model_validator(mode="after")
    def _stream_options_fit(self):
        options = self.stream_options
        if options and not self.stream:
            raise _wrong("stream_options", "has no effect without stream: true; remove it or set stream")
        if options and options.continuous_usage_stats and not options.include_usage:
            raise _wrong("stream_options.continuous_usage_stats", "needs include_usage: true")
        return self


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = Field(None, description="a string or a list of text parts")
    name: str | None = None
    reasoning: str | None = Field(None, description="of an assistant turn: handed to the chat template")
    reasoning_content: str | None = Field(None, description="the same under its older name")
    refusal: str | None = None
    annotations: list[Any] | None = Field(None, max_length=0)
    tool_calls: list[Any] | None = Field(None, max_length=0)
    function_call: None = None
    audio: None = None

    @field_validator("role", mode="before")
    @classmethod
    def _known_role(cls, role: Any) -> Any:
        if role in ("tool", "function"):
            raise PydanticCustomError("unsupported_role", _TOOLS)
        return role

    @field_validator("content", mode="before")
    @classmethod
    def _only_text(cls, content: Any) -> Any:
        for i, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise ValueError(f"part {i} is of type {kind[:64]!r}; this model reads only text parts")
        return content

    @model_validator(mode="after")
    def _says_something(self):
        if self.content is None and self.refusal is None and self.role != "assistant":
            raise ValueError("content is missing")
        return self


class TextFormat(Body):
    type: Literal["text"]


class ChatFields(Body):
    """What turns messages into a prompt."""

    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = Field(None, description="only if the server trusts its callers' templates")
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_way_to_end(self):
        if self.continue_final_message and self.add_generation_prompt:
            raise _wrong(
                "continue_final_message", "and add_generation_prompt exclude each other; set one to false"
            )
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise _wrong("continue_final_message", "needs a last message of role assistant")
        return self


class ChatRequest(Generate, ChatFields):
    """POST /v1/chat/completions"""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description="with logprobs: alternatives for each token")
    response_format: TextFormat | None = None
    tools: list[Any] | None = Field(None, max_length=0)
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: None = None
    functions: list[Any] | None = Field(None, max_length=0)
    function_call: Literal["none"] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None

    @model_validator(mode="after")
    def _fields_agree(self):
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise _wrong("max_tokens", "and max_completion_tokens differ; they mean the same, send one")
        if self.top_logprobs is not None and not self.logprobs:
            raise _wrong("top_logprobs", "needs logprobs: true")
        if self.add_special_tokens:
            raise _wrong(
                "add_special_tokens", "would repeat what the chat template writes; remove it or send false"
            )
        return self


class CompletionRequest(Generate):
    """POST /v1/completions"""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="a string, a list of strings, a list of token ids or a list of such lists"
    )
    best_of: int | None = None
    echo: bool | None = Field(None, description="give the prompt back before the output")
    logprobs: int | None = Field(None, description="alternatives for each token")
    suffix: None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_kind(cls, prompt: Any) -> Any:
        return _prompt_of_one_kind(prompt)

    @model_validator(mode="after")
    def _fields_agree(self):
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise _wrong("best_of", "cannot be streamed: the best is known at the end; set stream to false")
        if self.max_tokens == 0 and not self.echo:
            raise _wrong(
                "max_tokens", "is 0, which asks for nothing; set echo to get the prompt back, or raise it"
            )
        return self


class TokenizePrompt(Body):
    """POST /tokenize of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatFields):
    """POST /tokenize of a conversation."""

    model: str | None = None
    add_special_tokens: Literal[False] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[int]


def _prompt_of_one_kind(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(
            "must be a string, a list of strings, a list of token ids or a list of such lists, not empty"
        )
    kind = type(prompt[0])
    if kind not in (str, int, list) or any(type(item) is not kind for item in prompt):
        raise ValueError("the list must hold only strings, only token ids, or only lists of token ids")
    if kind is list and any(type(token) is not int for ids in prompt for token in ids):
        raise ValueError("the lists in the list must hold only token ids, which are whole numbers")
    return prompt


def _wrong(field: str, advice: str) -> PydanticCustomError:
    """A complaint about `field` in the light of others."""
    return PydanticCustomError("fields_disagree", "{field} {advice}", {"field": field, "advice": advice})
