"""Messages as they come from clients, made into what chat templates are written for."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.text.jinja_environment import refusal

ROLE = re.compile(r"[A-Za-z][\w-]{0,63}")
TRUSTED_ROLES = frozenset({"system", "developer", "assistant"})
END = "\ufdd1 "  # a noncharacter; the space tells whether the template trims


def prepare(messages: Sequence[Mapping[str, Any]], *, parts: bool, developer: bool) -> list[dict[str, Any]]:
    """Copies with content as one string (or, for `parts`, as a list) and tool arguments as objects.

    A developer message is a system message to templates that know no `developer`. Refused: no messages, a
    message without a role, and content that is not text.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise refusal("messages must be a list of at least one {role, content}")
    return [_message(message, f"messages[{at}]", parts, developer) for at, message in enumerate(messages)]


def mark_end(messages: list[dict[str, Any]]) -> None:
    """Marks where the last message's text ends, so that the rendered conversation can be cut there."""
    content = messages[-1].get("content")
    if not content:
        raise refusal("continue_final_message needs text in the last message to go on from")
    if isinstance(content, str):
        messages[-1]["content"] = content + END
    else:
        content[-1]["text"] += END


def cut_at_mark(text: str) -> str:
    """`text` up to the mark, without the white space that the template would have trimmed there."""
    before, found, after = text.rpartition(END.rstrip())
    if not found:
        raise refusal("the chat template leaves out the end of the last message, so it cannot be continued")
    return before if after.startswith(" ") else before.rstrip()


def _message(message: Mapping[str, Any], where: str, parts: bool, developer: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise refusal(f"{where} must be an object with role and content, not {type(message).__name__}")
    # An absent field that a client sends as null must look absent to templates; content may be null.
    prepared = {key: value for key, value in message.items() if value is not None or key == "content"}
    role = prepared.get("role")
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise refusal(f"{where}.role must be a name such as user, assistant, system or tool, not {role!r}")
    if role == "developer" and not developer:
        prepared["role"] = "system"
    if "content" not in prepared and "tool_calls" not in prepared:
        raise refusal(f"{where} has no content; give it a text, or null where there is none")
    if "content" in prepared:
        prepared["content"] = _content(prepared["content"], f"{where}.content", parts)
    if "tool_calls" in prepared:
        calls = prepared["tool_calls"]
        if not isinstance(calls, list):
            raise refusal(f"{where}.tool_calls must be a list, not {type(calls).__name__}")
        prepared["tool_calls"] = [_tool_call(call, f"{where}.tool_calls") for call in calls]
    return prepared


def _content(content: Any, where: str, parts: bool) -> Any:
    if content is None:
        return None
    texts = [content] if isinstance(content, str) else _texts(content, where)
    if parts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _texts(content: Any, where: str) -> list[str]:
    if not isinstance(content, list):
        raise refusal(f"{where} must be a string or a list of text parts, not {type(content).__name__}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise refusal(
                f"{where} has a part of type {kind!r}; this model takes text: {{type: text, text: ...}}"
            )
        texts.append(text)
    return texts


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Clients send arguments as JSON text; templates expect the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refusal(f"{where} must be a list of {{id, type: function, function: {{name, arguments}}}}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as why:
            raise refusal(f"{where}: arguments of {function['name']} are not JSON: {why}") from why
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}
