"""What a load run amounts to: vLLM's result fields, as a table, as JSON and as a plot of latency against load."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from bench.load import Record
from jaxserve.errors import ConfigError

METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per later output token",
    "itl": "Time between pieces of output",
    "e2el": "Whole request",
}


def percentile(values: list[float], p: float) -> float:
    """The p-th percentile, linear between neighbours; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = (len(ordered) - 1) * p / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def goals(words: Sequence[str]) -> dict[str, float]:
    """`["ttft:500", "tpot:50"]` as milliseconds a request may take at most."""
    found = {}
    for word in words:
        name, _, limit = word.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise ConfigError(f"--goodput {word}: a goal is ttft:MS, tpot:MS or e2el:MS")
        try:
            found[name] = float(limit)
        except ValueError:
            raise ConfigError(f"--goodput {word}: {limit!r} is not a number of milliseconds") from None
    return found


def summarize(
    records: list[Record], duration: float, *, percentiles: Sequence[float], goodput: dict[str, float]
) -> dict[str, Any]:
    """The result fields of `vllm bench serve`, latencies in milliseconds, rates a second."""
    done = [record for record in records if not record.error]
    output, inputs = sum(r.output_tokens for r in done), sum(r.input_tokens for r in done)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(records) - len(done),
        "errors": sorted({r.error for r in records if r.error}),
        "total_input_tokens": inputs,
        "total_output_tokens": output,
        "request_throughput": len(done) / duration,
        "request_goodput": sum(_meets(r, goodput) for r in done) / duration if goodput else None,
        "output_throughput": output / duration,
        "total_token_throughput": (inputs + output) / duration,
    }
    for name, values in _latencies(done).items():
        result[f"mean_{name}_ms"] = fmean(values) if values else math.nan
        result[f"median_{name}_ms"] = percentile(values, 50)
        result[f"std_{name}_ms"] = pstdev(values) if values else math.nan
        for p in percentiles:
            result[f"p{p:g}_{name}_ms"] = percentile(values, p)
    return result


def _latencies(done: list[Record]) -> dict[str, list[float]]:
    seconds = {
        "ttft": [r.ttft for r in done],
        "tpot": [r.tpot for r in done if r.tpot is not None],
        "itl": [gap for r in done for gap in r.itls],
        "e2el": [r.e2el for r in done],
    }
    return {name: [1e3 * value for value in values] for name, values in seconds.items()}


def _meets(record: Record, goodput: dict[str, float]) -> bool:
    return all(1e3 * (getattr(record, name) or 0.0) <= limit for name, limit in goodput.items())


def show(runs: list[dict[str, Any]], percentiles: Sequence[float]) -> None:
    """A table to the terminal, one column a run."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=str(runs[0]["model_id"]), title_justify="left")
    table.add_column("")
    for run in runs:
        rate = run["request_rate"]
        table.add_column("all at once" if rate == "inf" else f"{rate:g} arrivals/s", justify="right")
    rows = [
        ("Requests completed / failed", "{completed} / {failed}"),
        ("Requests/s", "{request_throughput:.2f}"),
        ("Output tokens/s", "{output_throughput:.1f}"),
        ("All tokens/s", "{total_token_throughput:.1f}"),
    ]
    if runs[0]["request_goodput"] is not None:
        rows.insert(2, ("Requests/s within the goals", "{request_goodput:.2f}"))
    for name, title in METRICS.items():
        rows.append((f"{title}, mean (ms)", f"{{mean_{name}_ms:.1f}}"))
        rows += [(f"  p{p:g}", f"{{p{p:g}_{name}_ms:.1f}}") for p in percentiles]
    for title, form in rows:
        table.add_row(title, *(form.format(**run) for run in runs))
    console = Console()
    console.print(table)
    for error in sorted({error for run in runs for error in run["errors"]}):
        console.print(f"failed: {error}", style="red", markup=False)


def save(path: str, settings: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    """Settings and runs as JSON; what could not be measured is null."""

    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    runs = [{name: plain(value) for name, value in run.items()} for run in runs]
    Path(path).write_text(json.dumps({"settings": settings, "runs": runs}, indent=1) + "\n")


def plot(path: str, runs: list[dict[str, Any]], tail: float) -> None:
    """Median and `tail` percentile of the latencies against the load that was really served."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    for run in runs:
        if not run["completed"]:
            raise ConfigError(f"nothing to plot: no request was answered at rate {run['request_rate']}")
    ordered = sorted(runs, key=lambda run: float(run["request_rate"]))  # past saturation the curve turns back
    served = [run["request_throughput"] for run in ordered]
    for axis, name in zip(axes, ("ttft", "tpot", "e2el"), strict=True):
        for key in (f"median_{name}_ms", f"p{tail:g}_{name}_ms"):
            axis.plot(served, [run[key] for run in ordered], marker="o", label=key.split("_")[0])
        axis.set(title=METRICS[name], xlabel="requests served a second", ylabel="ms", ylim=(0, None))
        axis.legend()
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
