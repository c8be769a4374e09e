"""The support table, written from what the tests found: `make docs`.

Input is the JSON that `pytest --support-report` writes; a row works when every test that carries it passed.
"""

import json
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import TypedDict

BEGIN, END = "<!-- support table: written by `make docs` -->", "<!-- end of the support table -->"
MANY = 12  # entries of an area that the overview does not name one by one


class Row(TypedDict):
    """One capability and whether its tests passed."""

    area: str
    name: str
    works: bool


def overview(rows: list[Row]) -> str:
    """One line an area: what works and, if anything, what does not; of many entries how many begin with a word."""
    lines = ["| Area | Works | Fails |", "|---|---|---|"]
    for area, of_area in _areas(rows).items():
        cells = [
            _short(sorted(row["name"] for row in of_area if row["works"] is works)) for works in (True, False)
        ]
        lines.append(f"| {area} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def details(rows: list[Row]) -> str:
    """Every entry, area by area; those of kernels, which are compiled for several chips, as tables."""
    parts = []
    for area, of_area in _areas(rows).items():
        if area.endswith("kernels, compiled"):
            lines = _matrix(of_area)
        else:
            lines = [f"- {row['name']}{'' if row['works'] else ': **fails**'}" for row in of_area]
        parts.append("\n".join([f"## {area}", "", *lines]))
    return "\n" + "\n\n".join(parts) + "\n"


def _areas(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows by area, both in order."""
    ordered = sorted(rows, key=lambda row: (row["area"].lower(), row["name"].lower()))
    return {area: list(of_area) for area, of_area in groupby(ordered, key=lambda row: row["area"])}


def _short(names: list[str]) -> str:
    if len(names) > MANY:
        words = [name.split()[0] for name in names]
        alike = {word: count for word, count in Counter(words).items() if count > 2}
        shown = [f"{w} ({alike[w]})" if w in alike else n for n, w in zip(names, words, strict=True)]
        names = list(dict.fromkeys(shown))
    return "; ".join(names)


def _matrix(rows: list[Row]) -> list[str]:
    """Names end with a chip: one line for each beginning, one column for each chip."""
    works = {tuple(row["name"].rsplit(" ", 1)): row["works"] for row in rows}
    chips = sorted({chip for _, chip in works})
    lines = [f"| | {' | '.join(chips)} |", "|---|" + "---|" * len(chips)]
    for name in dict.fromkeys(name for name, _ in works):
        cells = [{True: "yes", False: "**fails**", None: ""}[works.get((name, chip))] for chip in chips]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def written_into(text: str, table: str) -> str:
    """`text` with what stands between the two marks replaced by the table."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"there is no place for the table: {BEGIN} and {END} must both be there")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main(argv: list[str]) -> None:
    root = Path(__file__).parents[1]
    rows = json.loads(Path(argv[1]).read_text())
    for path, table in ((root / "README.md", overview), (root / "docs" / "support.md", details)):
        path.write_text(written_into(path.read_text(), table(rows)))


if __name__ == "__main__":
    main(sys.argv)
