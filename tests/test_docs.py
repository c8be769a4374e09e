"""The documentation is true: its Python examples run and print what it says, and its flags exist."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from bench.config import LoadConfig
from jaxserve import demo
from jaxserve.errors import ConfigError
from server import cli
from server.flags import Parser, add_flags

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def examples(page: Path) -> list[tuple[str, str]]:
    """(code, expected output) of each python block; the output is the text block right after it."""
    found = re.findall(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", page.read_text(), flags=re.DOTALL)
    assert found, f"{page.name} has no example"
    return found


@pytest.mark.timeout(900)
@pytest.mark.supports("API", "LLM, AsyncLLM and the jitted step")
def test_the_examples_of_the_api_print_what_the_page_says(compilation_cache_dir, monkeypatch):
    try:
        demo.demo_model()
    except ConfigError as missing:
        pytest.skip(str(missing))
    monkeypatch.setenv("HOME", compilation_cache_dir)  # where compiled steps are kept by default
    names: dict[str, object] = {}
    for code, expected in examples(ROOT / "docs" / "api.md"):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, "docs/api.md", "exec"), names)
        assert out.getvalue() == expected, code


OTHERS = re.compile(r"^\s*(RUN )?pip |-m bench\.|transformers serve")  # lines with flags of other programs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_that_is_named_exists(page, capsys):
    parser = Parser(prog="bench")
    add_flags(parser, LoadConfig, title="load")
    known = parser.format_help()
    for command in ("serve", "chat", "generate", "convert", "quantize", "eval", "plan", "route"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        known += capsys.readouterr().out
    known += " --no-x --x --help --no-deps --tasks --model-args"  # of none, pip's and lm-eval's
    lines = [line for line in page.read_text().splitlines() if not OTHERS.search(line)]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", "\n".join(lines)))
    assert {flag for flag in named if flag.replace("_", "-") not in known} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
