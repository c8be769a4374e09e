"""`jaxserve plan`: the plan of a deployment as tables, and as JSON."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxserve.config import EngineConfig
from jaxserve.plan.planner import Plan, as_json, divided_for, plan

GB = 1e9


def run(config: EngineConfig, topology: str, context: int, output: str | None, save: str | None) -> None:
    """Plan, with a spinner while the compiler works; tables to stdout, everything to `output` as JSON."""
    errors = Console(stderr=True)
    with errors.status("reading the model") as status:
        found = plan(
            divided_for(config, topology),
            topology,
            context,
            on_step=lambda name: status.update(f"compiling the {name} step"),
            save=Path(save) if save else None,
        )
    show(found)
    if output:
        Path(output).write_text(json.dumps(as_json(found), indent=1) + "\n")


def show(p: Plan) -> None:
    """What fits, what is sent, and how fast it can be."""
    console = Console()
    console.print(f"{p.model} on {p.slice}: {p.devices} devices, {p.topology}", highlight=False)
    memory = Table(title="Memory of each device (GB)", title_justify="left")
    for title in ("weights", "cache", "sampler", "workspace and program", "headroom", "of"):
        memory.add_column(title, justify="right")
    busiest = max(step.compiled.workspace_bytes + step.compiled.program_bytes for step in p.steps)
    parts = (p.weight_bytes, p.cache_bytes, p.state_bytes, busiest, p.headroom_bytes, p.chip.hbm_bytes)
    memory.add_row(*(f"{part / GB:.2f}" for part in parts))
    console.print(memory)
    console.print(
        f"The cache holds {p.cache_tokens:,} tokens: {p.sequences:,} sequences of {p.context:,}. "
        f"Experts' weights: {p.experts}. Longest sequence: {p.max_model_len:,}.",
        highlight=False,
    )
    steps = Table(title="Steps", title_justify="left")
    for title in ("step", "new tokens", "compile", "least time", "limit", "tokens/s at most"):
        steps.add_column(title, justify="left" if title in ("step", "limit") else "right")
    for step in p.steps:
        tokens = step.compiled.bucket.tokens * p.groups
        steps.add_row(
            step.name,
            f"{tokens:,}",
            f"{step.compiled.seconds:.0f} s",
            f"{1e3 * step.least.seconds:.2f} ms",
            step.least.limit,
            f"{tokens / step.least.seconds:,.0f}",
        )
    console.print(steps)
    sent = Table(title="Sent between devices in a step, by each", title_justify="left")
    for title in ("step", "kind", "calls", "MB"):
        sent.add_column(title, justify="left" if title in ("step", "kind") else "right")
    for step in p.steps:
        for traffic in step.compiled.sent:
            sent.add_row(step.name, traffic.kind, str(traffic.calls), f"{traffic.nbytes / 1e6:,.1f}")
    console.print(sent)
