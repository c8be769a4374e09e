"""A template that came with a request can neither reach Python, nor run for ever, nor fill the memory."""

import pytest

from jaxserve.errors import RequestError
from jaxserve.text.jinja_environment import compile_template, render_template
from jaxserve.text.untrusted_template import render_untrusted


def test_a_decent_template_works():
    source = "{% for m in messages %}{{ m.role }}: {{ m.content | tojson }}{% endfor %}"
    assert render_untrusted(source, {"messages": [{"role": "user", "content": "é"}]}) == 'user: "é"'


def test_its_refusal_is_passed_on():
    with pytest.raises(RequestError, match="no system message"):
        render_untrusted("{{ raise_exception('no system message') }}", {})


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{% for i in range(1000000000) %}{% endfor %}", "[Rr]ange too big"),
        ("{% if %}", "not valid Jinja"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
)
def test_every_template_is_confined_to_its_sandbox(source, problem):
    with pytest.raises(RequestError, match=problem):
        render_template(compile_template(source), {"messages": []})


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "did not finish"),
        (
            "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "Memory|did not finish",
        ),
        ("{{ 'x' * 100000000000 }}", "Memory"),
        ("{{ 'x' * 10000000 }}", "10000000 characters; at most"),
        ("{{ x }}" + "(" * 300000, "has 300007 characters"),
    ],
)
def test_a_template_of_a_request_cannot_exhaust_the_server(source, problem):
    with pytest.raises(RequestError, match=problem) as refused:
        render_untrusted(source, {"messages": []})
    assert refused.value.code == "invalid_chat"
