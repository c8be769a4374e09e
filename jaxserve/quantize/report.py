"""What quantising cost: each weight's error, size, perplexity and KL against the original; as JSON and as a plot."""

import json
from pathlib import Path
from typing import Any

from jaxserve.evaluate import Evaluation

REPORT, PLOT = "report.json", "report.png"


def report(
    folder: Path,
    plan: dict[str, Any],
    errors: dict[str, float],
    sizes: tuple[int, int],
    found: Evaluation | None,
) -> dict[str, Any]:
    """Write both into `folder`; `sizes` are bytes of weights before and after."""
    values = {
        **plan,
        "bytes_before": sizes[0],
        "bytes_after": sizes[1],
        "evaluation": found.as_dict() if found else None,
        "relative_squared_output_error": errors,
    }
    (folder / REPORT).write_text(json.dumps(values, indent=1))
    _plot(folder / PLOT, values)
    return values


def _plot(path: Path, values: dict[str, Any]) -> None:
    from matplotlib.figure import Figure  # half a second to import

    kinds: dict[str, list[float]] = {}
    for name, error in values["relative_squared_output_error"].items():
        kinds.setdefault(name.removesuffix(".weight").rpartition(".")[2], []).append(error)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for kind, errors in kinds.items():
        axes.plot(errors, marker=".", label=kind)
    axes.set(
        xlabel="layer" if max(map(len, kinds.values())) > 1 else "weight",
        ylabel="relative squared error of the output",
        yscale="log",
        title=f"{values['format']} by {values['method']}",
    )
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=120)
