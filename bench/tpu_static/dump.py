"""The programs in a folder that the compiler wrote with --xla_jf_dump_to."""

import re
from pathlib import Path

from bench.tpu_static.chips import Chip
from bench.tpu_static.program import Program

_LISTING = re.compile(r"(\d+)-(.*)-(\d+)-final_bundles\.txt$")
_SHORTEST = 40  # lines: AllocateBuffer and the like are below


def load_dump(dump: str, chip: Chip, select: str | None = None, everything: bool = False) -> list[Program]:
    """The kernels whose name matches `select`; Pallas kernels only, unless `everything`."""
    files = sorted(Path(dump).glob("*.txt")) if Path(dump).is_dir() else []
    assembly = _first(files[::-1], "-assembly.txt")
    programs = []
    for path in files:
        match = _LISTING.match(path.name)
        if not match or "schedule-analysis" in path.name or "static_gap" in path.name:
            continue
        number, name = match.group(1), match.group(2)
        if name == "TLP" or name.startswith("<late") or (select and not re.search(select, name)):
            continue
        text = _read(path)
        if not everything and "custom-call(" not in text[-20000:] + text[:20000]:
            continue
        if text.count("\n") < _SHORTEST:
            continue
        siblings = [p for p in files if p.name.startswith(f"{number}-{name}-")]
        programs.append(
            Program(
                name,
                text,
                chip,
                _first(siblings, "-final_hlo-static-per-bundle-utilization.txt"),
                _first(siblings, "-pre-finalize-registers-and-allocations.txt"),
                assembly,
            )
        )
    return programs


def _first(files: list[Path], end: str) -> str | None:
    return next((_read(path) for path in files if path.name.endswith(end)), None)


def _read(path: Path) -> str:
    return path.read_text(errors="replace")
