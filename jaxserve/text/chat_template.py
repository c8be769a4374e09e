"""Chat templates: a model's own Jinja programs that write a conversation as one text."""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from jaxserve.errors import RequestError
from jaxserve.text.jinja_environment import compile_template, refusal, render_template
from jaxserve.text.untrusted_template import render_untrusted

PROBE = "jaxserve probe"


class ChatTemplate:
    """The templates of a checkpoint ("default", perhaps others by name) with the tokens they refer to."""

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
            known = ", ".join(sorted(self.templates)) or "none"
            raise refusal(
                f"chat template {wanted!r} is neither one of this model's ({known}) nor a template itself"
            )
        return self.templates[wanted]

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """The conversation as text. A template that is not the checkpoint's own is rendered under limits."""
        variables = {**self.named_tokens, **variables}
        if source not in self.templates.values():
            return render_untrusted(source, variables)
        if source not in self._compiled:
            self._compiled[source] = compile_template(source)
        return render_template(self._compiled[source], variables)

    def takes_parts(self, source: str) -> bool:
        """Whether one of the checkpoint's own templates would lose content that is not a list of parts."""
        if source not in self.templates.values():
            return False
        if source not in self._takes_parts:
            parts = [{"type": "text", "text": PROBE}]
            self._takes_parts[source] = not self._shows(source, PROBE) and self._shows(source, parts)
        return self._takes_parts[source]

    def _shows(self, source: str, content: str | Sequence[Mapping[str, str]]) -> bool:
        messages = [{"role": "user", "content": content}]
        try:
            return PROBE in self.render(source, {"messages": messages, "add_generation_prompt": True})
        except RequestError:
            return False
