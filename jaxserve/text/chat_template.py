"""Chat templates: a model's own Jinja program that writes a conversation as one text."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.errors import RequestError

PROBE = "jaxserve probe"


class GenerationBlock(Extension):
    """`{% generation %}` marks what a model writes itself, for training; here its content is simply written."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as templates expect it: nothing is escaped for HTML, and letters stay letters."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return re.sub(r"[^\x00-\x7f\ufdd0]", lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def environment() -> ImmutableSandboxedEnvironment:
    """Jinja as templates are written for: the settings, filters and functions of transformers."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


class ChatTemplate:
    """The templates of a checkpoint ("default" and perhaps others by name) with the tokens they refer to."""

    def __init__(self, templates: Mapping[str, str], named_tokens: Mapping[str, Any]):
        self.templates, self.named_tokens = dict(templates), dict(named_tokens)
        self._compiled: dict[str, jinja2.Template] = {}
        self._takes_parts: dict[str, bool] = {}

    def source(self, name: str | None = None, *, tools: bool = False) -> str:
        """The template that is meant: `name` may be a template itself; with tools, "tool_use" comes first."""
        if name is not None and name not in self.templates and "{" in name:
            return name
        wanted = name or ("tool_use" if tools and "tool_use" in self.templates else "default")
        if wanted not in self.templates:
            raise _refusal(f"this model has no chat template {wanted!r}; it has {', '.join(self.templates) or 'none'}")
        return self.templates[wanted]

    def render(self, source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The conversation as text; whatever a template complains of is a RequestError with its own words."""
        try:
            template = self._compiled.get(source)
            if template is None:
                template = environment().from_string(source)
                if source in self.templates.values():
                    self._compiled[source] = template
            return template.render({**self.named_tokens, **variables, "messages": messages})
        except jinja2.TemplateSyntaxError as why:
            raise _refusal(f"the chat template is not valid Jinja (line {why.lineno}): {why}") from why
        except jinja2.TemplateError as why:
            raise _refusal(str(why)) from why
        except Exception as why:  # a template is a program: it may fail in any way
            raise _refusal(f"the chat template cannot render these messages: {type(why).__name__}: {why}") from why

    def takes_parts(self, source: str) -> bool:
        """Whether the template wants content as a list of parts, and would lose a plain string."""
        if source not in self._takes_parts:
            self._takes_parts[source] = not self._shows(source, PROBE) and self._shows(
                source, [{"type": "text", "text": PROBE}]
            )
        return self._takes_parts[source]

    def _shows(self, source: str, content: Any) -> bool:
        try:
            return PROBE in self.render(source, [{"role": "user", "content": content}], {"add_generation_prompt": True})
        except RequestError:
            return False


def _refusal(message: str) -> RequestError:
    return RequestError(message, param="messages", code="invalid_chat")
