"""From what callers write to token ids: chat templates, texts, truncation, and the length that fits."""

from collections.abc import Callable
from typing import Any

from starlette.concurrency import run_in_threadpool

from jaxserve.errors import RequestError
from server.schema import ChatFields, CompletionRequest, Message
from server.served import Served

LARGE = 8192  # characters from which on tokenising leaves the event loop to others


async def chat_tokens(served: Served, body: ChatFields) -> tuple[list[int], str]:
    """The token ids and the text of a conversation."""
    if body.chat_template is not None and not served.config.trust_request_chat_template:
        raise RequestError(
            "chat_template is not taken from requests; start the server with --trust-request-chat-template",
            param="chat_template",
        )
    generate = body.add_generation_prompt
    size = sum(len(str(message.content)) for message in body.messages)
    return await off_loop(
        size,
        served.tokenizer.encode_chat,
        [_as_template_sees(message) for message in body.messages],
        add_generation_prompt=not body.continue_final_message if generate is None else generate,
        continue_final_message=bool(body.continue_final_message),
        template=body.chat_template,
        template_kwargs=body.chat_template_kwargs,
        special_in_content=served.config.allow_special_tokens_in_content,
    )


async def completion_prompts(served: Served, body: CompletionRequest) -> list[tuple[list[int], str | None]]:
    """Token ids and, if it was written as one, the text of each prompt."""
    prompts: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if prompts and isinstance(prompts[0], int):
        prompts = [prompts]
    size = sum(map(len, prompts))
    return await off_loop(size, lambda: [_completion_prompt(served, body, prompt) for prompt in prompts])


async def tokens_text(served: Served, ids: list[int], skip_special_tokens: bool) -> str:
    """The text of token ids; a RequestError if one is not in the vocabulary."""

    def decoded() -> str:
        check_vocabulary(served, ids, "tokens")
        return served.engine.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    return await off_loop(len(ids), decoded)


async def off_loop[**P, T](size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` gives; on another thread than the event loop's if `size`, in characters or tokens, is large."""
    if size < LARGE:
        return work(*args, **kwargs)
    return await run_in_threadpool(work, *args, **kwargs)


def check_vocabulary(served: Served, ids: list[int], param: str) -> None:
    """Refuse ids that the tokenizer does not have."""
    size = served.engine.tokenizer.vocab_size
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is not None:
        raise RequestError(
            f"{param} has the token id {str(wrong)[:32]}; the vocabulary has 0 to {size - 1}", param=param
        )


def truncated(served: Served, ids: list[int], keep: int | None, max_tokens: int | None) -> list[int]:
    """The last `keep` of `ids` (-1: as many as leave room for the output)."""
    if keep == -1:
        keep = max(served.max_model_len - (1 if max_tokens is None else max_tokens), 1)
    return ids if keep is None or keep < 1 else ids[-keep:]


def check_length(served: Served, ids: list[int], max_tokens: int | None, *, messages: bool) -> None:
    """Refuse what cannot fit into the model's context, in the words that clients look for."""
    limit, prompt, output = served.max_model_len, len(ids), 1 if max_tokens is None else max_tokens
    if prompt + output <= limit:
        return
    param = "messages" if messages else "prompt"
    raise RequestError(
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt + output} tokens "
        f"({prompt} in the {param}, {output} in the completion). Please reduce the length of the {param} or of the "
        "completion.",
        param=param,
        code="context_length_exceeded",
    )


def _completion_prompt(served: Served, body: CompletionRequest, prompt: Any) -> tuple[list[int], str | None]:
    special = body.add_special_tokens is not False
    if isinstance(prompt, str):
        ids = served.engine.tokenizer.encode(prompt, add_special_tokens=special)
    else:
        check_vocabulary(served, prompt, "prompt")
        ids = prompt
    if not ids:
        why = "this model's tokenizer puts no beginning-of-sequence token before a text"
        if not isinstance(prompt, str):
            why = "a list of token ids is taken as it is"
        elif not special:
            why = "add_special_tokens is false"
        raise RequestError(
            f"the prompt is empty, and {why}; write something", param="prompt", code="empty_prompt"
        )
    return ids, prompt if isinstance(prompt, str) else None


def _as_template_sees(message: Message) -> dict[str, Any]:
    seen = message.model_dump(include={"role", "content", "name"}, exclude_none=True)
    seen.setdefault("content", message.refusal or "")
    thoughts = message.reasoning_content or message.reasoning
    return seen | ({"reasoning_content": thoughts} if thoughts else {})
