"""The support table says what the tests found; README has the overview of what docs/support.md has in full."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from bench.support import BEGIN, END, Row, details, overview, written_into

ROOT = Path(__file__).parents[2]
ROWS: list[Row] = [
    {"area": "models", "name": "llama", "works": True},
    {"area": "models", "name": "qwen3", "works": False},
    {"area": "formats", "name": "GGUF", "works": True},
]


def test_a_row_is_where_its_tests_put_it():
    assert overview(ROWS).splitlines()[2:] == ["| formats | GGUF |  |", "| models | llama | qwen3 |"]
    assert details(ROWS).splitlines()[1:] == [
        "## formats", "", "- GGUF", "", "## models", "", "- llama", "- qwen3: **fails**",
    ]  # fmt: skip


def test_of_many_entries_the_overview_has_how_many_begin_with_a_word():
    rows: list[Row] = [{"area": "checkpoints", "name": f"GGUF Q{i}", "works": True} for i in range(15)]
    rows.append({"area": "checkpoints", "name": "Orbax (converted)", "works": True})
    assert overview(rows).splitlines()[2:] == ["| checkpoints | GGUF (15); Orbax (converted) |  |"]


def test_kernels_are_a_table_of_chips():
    names = {"matmul mxfp4 v5e": True, "matmul mxfp4 v6e": False, "matmul BF16 v6e": True}
    rows: list[Row] = [{"area": "TPU kernels, compiled", "name": n, "works": w} for n, w in names.items()]
    assert details(rows).splitlines()[3:] == [
        "| | v5e | v6e |", "|---|---|---|", "| matmul BF16 |  | yes |", "| matmul mxfp4 | yes | **fails** |",
    ]  # fmt: skip


def test_only_the_text_between_the_marks_is_replaced():
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert written_into(text, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    with pytest.raises(SystemExit):
        written_into("no marks", "new")


def test_readme_and_docs_are_of_the_same_areas():
    def held(path: str) -> str:
        return (ROOT / path).read_text().split(BEGIN)[1].split(END)[0]

    areas = {line.split(" | ")[0].strip("| ") for line in held("README.md").strip().splitlines()[2:]}
    assert areas == {line[3:] for line in held("docs/support.md").splitlines() if line.startswith("## ")}


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
