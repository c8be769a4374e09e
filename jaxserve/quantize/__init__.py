"""Quantising a model: `quantize` writes it in a low-bit format, with a report of what that cost."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxserve.checkpoint_config import QuantizeConfig
from jaxserve.evaluate import compare, loaded
from jaxserve.quantize.report import report
from jaxserve.quantize.run import Quantizer
from jaxserve.text import load_tokenizer
from jaxserve.text_windows import windows
from jaxserve.weights import convert, open_checkpoint

__all__ = ["quantize"]
ORBAX = "orbax"


def quantize(plan: QuantizeConfig, dst: str, *, progress: bool = True) -> dict[str, Any]:
    """Quantise as planned into the folder `dst`, and return the report that is written there.

    `dst` is a checkpoint in the convention of compressed-tensors; `dst`/orbax is the same in jaxserve's own form.
    Stopped in the middle, the same call goes on. Perplexity and KL are measured on `samples` windows of `eval_text`,
    or on the part of the calibration text that was kept for that.
    """
    folder = Path(dst).expanduser()
    quantizer = Quantizer(plan, folder)
    quantizer.run(progress)
    convert(str(folder), str(folder / ORBAX), overwrite=True, progress=progress)
    pieces = quantizer.windows()[1]
    if plan.eval_text:
        pieces = windows(plan.eval_text, load_tokenizer(plan.source), plan.length, plan.samples)
    found = compare(loaded(str(folder)), loaded(plan.source), pieces=pieces) if len(pieces) else None
    sizes = [
        sum(c.nbytes(name) for name in c.names())
        for c in (quantizer.checkpoint, open_checkpoint(str(folder)))
    ]
    return report(folder, asdict(plan), quantizer.errors, (sizes[0], sizes[1]), found)
