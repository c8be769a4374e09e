"""jaxserve beside Hugging Face transformers on this machine, interleaved, same model, same prompts, float32.

    python -m bench.peers --peer-python PATH [--model demo:smollm2] [--rounds 5] [--output peers.json]

The peer lives in an environment of its own, which is made once (any Python that PyTorch supports):

    python3 -m venv peer && peer/bin/pip install torch transformers gguf accelerate sentencepiece

Both run as subprocesses that speak JSON lines: each in turn answers a case, round after round, so that a busy
machine slows both alike. Decode speed is the difference between a long answer and one of a single token.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.demo import resolve_demo
from jaxserve.text import load_tokenizer

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Case:
    """A batch of prompts of one length; `new_tokens` 1 measures prefill, more measures decode."""

    name: str
    batch: int
    prompt_len: int
    new_tokens: int


CASES = (
    Case("decode, 1 stream", 1, 128, 65),
    Case("decode, batch 8", 8, 128, 65),
    Case("decode, batch 32", 32, 128, 33),
    Case("prefill 512", 1, 512, 1),
)


class Worker:
    """One engine in its own process."""

    def __init__(self, name: str, process: subprocess.Popen):
        self.name, self.process = name, process
        ready = self._read()
        self.version, self.load_seconds = ready["ready"], ready["seconds"]
        self.peak_mib = 0.0

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        self.peak_mib = answer["peak_mib"]
        return answer["seconds"], answer["tokens"]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self.process.wait()}; its last words are above")
        return json.loads(line)


@contextmanager
def started(name: str, command: list[str]) -> Iterator[Worker]:
    """A worker that is loaded and warm, ended with the block."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield Worker(name, process)
    finally:
        process.terminate()
        process.wait()


def main() -> int:
    args = _parser().parse_args()
    model = resolve_demo(args.model)
    tokens = load_tokenizer(model).encode((ROOT / "LICENSE").read_text(), add_special_tokens=False)
    with ExitStack() as stack:
        # -P: transformers looks for a package "kernels", and must not find ours beside the script.
        peer = [args.peer_python, "-P", str(ROOT / "bench" / "peer_transformers.py"), model]
        ours = [sys.executable, "-m", "bench.peer_jaxserve", model]
        workers = [
            stack.enter_context(started("jaxserve", ours)),
            stack.enter_context(started("transformers", peer)),
        ]
        rows = [measure(case, workers, tokens, args.rounds) for case in CASES if args.only in case.name]
        result = {
            "workers": [
                {"name": w.name, "version": w.version, "load_seconds": w.load_seconds} for w in workers
            ],
            "peak_mib": {w.name: w.peak_mib for w in workers},
            "cases": rows,
        }
    show(result)
    if args.output:
        Path(args.output).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "bench.peers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--peer-python", required=True, metavar="PATH", help="a Python that has torch and transformers"
    )
    parser.add_argument(
        "--model", default="demo:smollm2", help="checkpoint that both load (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="measured rounds a case (default: 5)"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only the cases whose name contains this")
    parser.add_argument("--output", metavar="FILE", help="results as JSON")
    return parser


def measure(case: Case, workers: list[Worker], text: list[int], rounds: int) -> dict[str, Any]:
    """Median tokens/s of each worker; the first round warms up, and the worker that goes first alternates."""
    speeds: dict[str, list[float]] = {worker.name: [] for worker in workers}
    equal = 0
    for round in range(rounds + 1):
        prompts = _prompts(case, text, round)
        answers = []
        for worker in workers if round % 2 else reversed(workers):
            speed, tokens = _speed(worker, case, prompts)
            answers.append(tokens)
            if round:
                speeds[worker.name].append(speed)
        if round:
            equal += sum(a == b for a, b in zip(*answers, strict=True))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return {
        "case": case.name,
        "tokens_per_second": medians,
        "ratio": medians["jaxserve"] / medians["transformers"],
        "equal_answers": equal,
        "answers": rounds * case.batch,
        "all": speeds,
    }


def _prompts(case: Case, text: list[int], round: int) -> list[list[int]]:
    """Windows of the text, all different within a batch and new in each round."""
    span = len(text) - case.prompt_len
    starts = [(round * 7 + i * span // case.batch) % span for i in range(case.batch)]
    return [text[start : start + case.prompt_len] for start in starts]


def _speed(worker: Worker, case: Case, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """(tokens/s, the answers): of the prompt for prefill, of the tokens after the first for decode."""
    first, tokens = worker.generate(prompts, 1)
    if case.new_tokens == 1:
        return case.batch * case.prompt_len / first, tokens
    whole, tokens = worker.generate(prompts, case.new_tokens)
    return case.batch * (case.new_tokens - 1) / (whole - first), tokens


def show(result: dict[str, Any]) -> None:
    """The comparison as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Median tokens/s", title_justify="left")
    for title in ("", "jaxserve", "transformers", "ratio", "equal answers"):
        table.add_column(title, justify="left" if not title else "right")
    for row in result["cases"]:
        speeds = [f"{row['tokens_per_second'][name]:.1f}" for name in ("jaxserve", "transformers")]
        table.add_row(
            row["case"], *speeds, f"{row['ratio']:.2f}x", f"{row['equal_answers']}/{row['answers']}"
        )
    peaks = [f"{result['peak_mib'][name]:.0f}" for name in ("jaxserve", "transformers")]
    table.add_row("peak memory (MiB)", *peaks, f"{float(peaks[0]) / float(peaks[1]):.2f}x", "")
    console = Console()
    console.print(table)
    for worker in result["workers"]:
        console.print(
            f"{worker['name']}: {worker['version']}, loaded in {worker['load_seconds']:.1f} s",
            highlight=False,
        )
    if any(row["equal_answers"] < row["answers"] for row in result["cases"]):
        console.print("Some greedy answers differ: the engines do not compute the same.", style="red")


if __name__ == "__main__":
    sys.exit(main())
