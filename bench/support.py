"""The support table, written from what the tests found: `make docs`.

Input is the JSON that `pytest --support-report` writes; a row works when every test that carries it passed.
"""

import json
import sys
from pathlib import Path
from typing import TypedDict

BEGIN, END = "<!-- support table: written by `make docs` -->", "<!-- end of the support table -->"


class Row(TypedDict):
    """One capability and whether its tests passed."""

    area: str
    name: str
    works: bool


def table(rows: list[Row]) -> str:
    """One line an area: what works and, if anything, what does not."""
    lines = ["| Area | Works | Fails |", "|---|---|---|"]
    for area in sorted({row["area"] for row in rows}):
        cells = [
            ", ".join(sorted(row["name"] for row in rows if row["area"] == area and row["works"] is works))
            for works in (True, False)
        ]
        lines.append(f"| {area} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


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
    for path in (root / "README.md", root / "docs" / "support.md"):
        path.write_text(written_into(path.read_text(), table(rows)))


if __name__ == "__main__":
    main(sys.argv)
