"""The ops that have a kernel for a platform, their cases, and what the support table calls a case's format."""

import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pallas_kernels
from pallas_kernels.op import Op


def every_op(platform: str) -> Iterator[tuple[Op, ModuleType]]:
    """(op, its cases) of those with a kernel for "tpu" or "gpu"."""
    for info in pkgutil.iter_modules(pallas_kernels.__path__):
        if info.ispkg:
            op = getattr(importlib.import_module(f"pallas_kernels.{info.name}"), info.name)
            if platform in op.kernels:
                yield op, importlib.import_module(f"pallas_kernels.{info.name}.cases")


def format_of(case: Any) -> str:
    """How the case's weights or pages are stored."""
    kept = getattr(case, "format", None) or getattr(case, "cache", None)
    return "BF16" if kept is None else getattr(kept, "name", kept)


def by_format(cases: dict[str, Any]) -> dict[str, list[tuple[str, Any]]]:
    """Named cases by their format."""
    found = defaultdict(list)
    for name, case in cases.items():
        found[format_of(case)].append((name, case))
    return found
