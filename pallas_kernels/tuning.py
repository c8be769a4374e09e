"""Block sizes: what a search found for the nearest shape, or else what a rule gives."""

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path

from pallas_kernels.chip import Chip

FOLDER = Path(__file__).parent / "tuned"
NEAR = 2.0  # doublings, summed over the key: farther than this the rule knows better


def nearest(op: str, chip: Chip, key: Mapping[str, int]) -> Mapping[str, int] | None:
    """The blocks found for the shape closest to `key` on this chip; None when none is near.

    `tuned/<chip>.json` holds {op: [{"key": {...}, "blocks": {...}}]}. Distance is the sum over the key of how many
    doublings lie between two numbers, so twice the batch is as far as half of it.
    """
    entries = [entry for entry in _tuned(chip.name).get(op, []) if entry["key"].keys() == key.keys()]
    best = min(entries, key=lambda entry: _distance(entry["key"], key), default=None)
    return best["blocks"] if best and _distance(best["key"], key) <= NEAR else None


def _distance(a: Mapping[str, int], b: Mapping[str, int]) -> float:
    return sum(abs(math.log2(max(a[name], 1) / max(b[name], 1))) for name in b)


@functools.cache
def _tuned(chip: str) -> dict:
    path = FOLDER / f"{chip}.json"
    return json.loads(path.read_text()) if path.exists() else {}
