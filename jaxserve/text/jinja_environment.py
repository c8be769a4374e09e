"""Jinja as chat templates are written for: transformers' settings, filters and functions, in a sandbox."""

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.errors import RequestError


class GenerationBlock(Extension):
    """`{% generation %}` marks what a model writes itself, for training; here its content is simply written."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def raise_exception(message: str) -> None:
    """How templates refuse a conversation."""
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    """Today, for templates that write the date."""
    return datetime.now().strftime(form)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: nothing is escaped for HTML, and letters stay letters."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if not ensure_ascii:
        return text
    # The mark of special_text.py is no text, and must not become any.
    return re.sub(r"[^\x00-\x7f\ufdd0]", lambda found: json.dumps(found[0])[1:-1], text)


def compile_template(source: str) -> jinja2.Template:
    """A template ready to render; RequestError says at which line it is not Jinja."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    try:
        return env.from_string(source)
    except jinja2.TemplateSyntaxError as why:
        raise refusal(f"the chat template is not valid Jinja (line {why.lineno}): {why.message}") from why
    except Exception as why:  # deep nesting, huge constants
        raise refusal(f"the chat template cannot be compiled: {type(why).__name__}: {why}") from why


def render_template(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """What the template writes; whatever it complains of is a RequestError in its own words."""
    try:
        return template.render(variables)
    except jinja2.TemplateError as why:
        raise refusal(str(why)) from why
    except Exception as why:  # a template is a program: it may fail in any way
        raise refusal(f"the chat template cannot render these messages: {type(why).__name__}: {why}") from why


def refusal(message: str) -> RequestError:
    """A conversation or template that cannot become a prompt."""
    return RequestError(message, param="messages", code="invalid_chat")
