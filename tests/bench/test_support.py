"""The support table says what the tests found, and README and docs/support.md hold the same one."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from bench.support import BEGIN, END, Row, table, written_into

ROOT = Path(__file__).parents[2]
ROWS: list[Row] = [
    {"area": "models", "name": "llama", "works": True},
    {"area": "models", "name": "qwen3", "works": False},
    {"area": "formats", "name": "GGUF", "works": True},
]


def test_a_row_is_where_its_tests_put_it():
    assert table(ROWS).splitlines()[2:] == ["| formats | GGUF |  |", "| models | llama | qwen3 |"]


def test_only_the_text_between_the_marks_is_replaced():
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert written_into(text, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    with pytest.raises(SystemExit):
        written_into("no marks", "new")


def test_readme_and_docs_hold_the_same_table():
    def held(path: str) -> str:
        return (ROOT / path).read_text().split(BEGIN)[1].split(END)[0]

    assert held("README.md") == held("docs/support.md")


def test_the_report_says_which_rows_passed(pytester_in):
    rows = pytester_in(
        """
        import pytest
        @pytest.mark.supports("models", "llama")
        def test_a(): pass
        @pytest.mark.supports("models", "qwen3")
        def test_b(): pass
        @pytest.mark.supports("models", "qwen3")
        def test_c(): assert False
        @pytest.mark.supports("models", "gemma")
        def test_d(): pytest.skip("no model")
        """
    )
    assert {row["name"]: row["works"] for row in rows} == {"llama": True, "qwen3": False, "gemma": False}


@pytest.fixture
def pytester_in(tmp_path):
    """Runs a test file under this project's conftest, and gives the rows of its report."""

    def run(source: str) -> list[Row]:
        (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
        (tmp_path / "test_rows.py").write_text(textwrap.dedent(source))
        command = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), str(tmp_path)]
        report = tmp_path / "out" / "report.json"
        subprocess.run([*command, "--support-report", str(report)], capture_output=True, cwd=tmp_path)
        return json.loads(report.read_text())

    return run
