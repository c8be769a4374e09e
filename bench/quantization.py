"""What each way of quantising costs a real model: perplexity, KL and size on SmolLM2-135M, as one table.

Rows are FORMAT/METHOD of weights, or cache/DTYPE: plain weights and a cache of this data type.

    python -m bench.quantization [--rows int4/gptq nvfp4/rotate ...] [--windows 8] [--output FILE]

Calibrated on the short text that comes with jaxserve, judged on another one that every Python has: pydoc's topics.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxserve.checkpoint_config import QuantizeConfig
from jaxserve.demo import demo_model
from jaxserve.evaluate import Loaded, compare, loaded
from jaxserve.quantize.run import Quantizer
from jaxserve.text import load_tokenizer
from jaxserve.text_windows import windows
from jaxserve.weights import open_checkpoint

ROWS = (
    "fp8/rtn", "int8/rtn", "int4/rtn", "int4/gptq", "int4/awq", "mxfp4/rtn", "mxfp4/gptq", "mxfp4/mr-gptq",
    "nvfp4/rtn", "nvfp4/gptq", "nvfp4/rotate", "nvfp4/spinquant", "nvfp4/mr-gptq",
    "cache/fp8_e4m3", "cache/fp8_e5m2", "cache/int8", "cache/int4",
)  # fmt: skip
LENGTH = 256


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="FORMAT/METHOD")
    parser.add_argument("--windows", type=int, default=8, help=f"of {LENGTH} tokens, to judge by")
    parser.add_argument("--output", metavar="FILE", help="write the rows as JSON, as they come")
    args = parser.parse_args()
    model = demo_model()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "topics.txt"
        text.write_text("\n\n".join(topics[name] for name in sorted(topics)))
        pieces = windows(str(text), load_tokenizer(model), LENGTH, args.windows)
        reference, results = loaded(model), []
        for row in args.rows:
            results.append(measure(model, row, Path(folder), reference, pieces))
            if args.output:
                Path(args.output).write_text(json.dumps(results, indent=1))
    show(results)


def measure(model: str, row: str, folder: Path, reference: Loaded, pieces: Any) -> dict[str, Any]:
    """One row of the table."""
    form, method = row.split("/")
    if form == "cache":
        found = compare(replace(reference, cache=method), reference, pieces=pieces).as_dict()
        c = reference.config
        return {
            "format": form,
            "method": method,
            "bits": (4 if method == "int4" else 8) + 32 / c.head_dim,
            **found,
        }
    began, path = time.perf_counter(), folder / row.replace("/", "-")
    Quantizer(QuantizeConfig(model, form, method, samples=16, length=LENGTH), path).run()
    seconds = time.perf_counter() - began
    checkpoint = open_checkpoint(str(path))
    linear = [name for name in checkpoint.names() if name.endswith("_proj.weight")]
    bits = 8 * sum(map(checkpoint.nbytes, linear)) / sum(_size(checkpoint.shape(name)) for name in linear)
    found = compare(loaded(str(path)), reference, pieces=pieces).as_dict()
    return {"format": form, "method": method, "bits": bits, "seconds": seconds, **found}


def show(results: list[dict[str, Any]]) -> None:
    table = Table(
        "format",
        "method",
        "bits",
        "perplexity",
        "change",
        "KL",
        "same top token",
        title="SmolLM2-135M-Instruct",
    )
    for r in results:
        change = r["perplexity"] / r["reference_perplexity"] - 1
        table.add_row(
            r["format"], r["method"], f"{r['bits']:.2f}", f"{r['perplexity']:.3f}", f"{change:+.2%}", f"{r['kl']:.4f}",
            f"{r['top1']:.1%}",
        )  # fmt: skip
    console = Console()
    console.print(table)
    if results:
        console.print(
            f"unquantised: {results[0]['reference_perplexity']:.3f} on {results[0]['tokens']} tokens"
        )


def _size(shape: tuple[int, ...]) -> int:
    return shape[0] * shape[1]


if __name__ == "__main__":
    main()
