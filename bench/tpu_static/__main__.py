"""What a TPU kernel costs, read from the compiler's own schedule: no TPU needed.

    python -m bench.tpu_static measure FILE.py:CASE --topology tpu7x:2x2x1 [--param k=v] [--json FILE]
    python -m bench.tpu_static analyse FOLDER --chip v6e      (an existing --xla_jf_dump_to folder)
    python -m bench.tpu_static chips                          (the constants, with their sources)

CASE is a function returning dict(fn=..., args=(...), select="regex of the kernel's name", flops=...). Arguments that
are numpy arrays are known numbers (page tables, lengths); `jax.ShapeDtypeStruct`s are abstract.
"""

import argparse
import json
import os
import signal
import sys

from bench.tpu_static.analysis import analyse
from bench.tpu_static.chips import CHIPS, chip_for
from bench.tpu_static.dump import load_dump
from bench.tpu_static.measure import measure, reanalyse
from bench.tpu_static.report import report


def _value(text: str):
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = ap.add_subparsers(dest="cmd", required=True)
    m = sub.add_parser("measure")
    m.add_argument("target")
    m.add_argument("--topology", action="append", required=True)
    m.add_argument("--param", action="append", default=[], metavar="K=V")
    m.add_argument("--select", help="only kernels whose name matches this regex")
    m.add_argument("--all", action="store_true", help="XLA fusions too, not only Pallas")
    m.add_argument("--flags", default="", help="more LIBTPU_INIT_ARGS")
    m.add_argument("--timeout", type=float, default=600)
    m.add_argument("--trace-seconds", type=float, default=120)
    m.add_argument("--keep", help="keep the dump here")
    m.add_argument("--json", help="append one JSON line per topology to this file")
    m.add_argument("--no-loops", action="store_true")
    a = sub.add_parser("analyse")
    a.add_argument("dump")
    a.add_argument("--chip", required=True)
    a.add_argument("--select")
    a.add_argument("--all", action="store_true")
    sub.add_parser("chips")
    ns = ap.parse_args()
    if ns.cmd == "chips":
        for c in CHIPS.values():
            print(
                f"{c.name:6s} bf16 {c.bf16 / 1e12:.0f} T, int8 {c.int8 / 1e12:.0f} T, fp8 "
                f"{c.fp8 / 1e12:.0f} T, HBM {c.hbm_bw / 1e9:.0f} GB/s {c.hbm_bytes / 1e9:.0f} GB, "
                f"VMEM {c.vmem_per_core >> 20} MiB/core, {c.cores} core(s), "
                f"{c.devices_per_chip} device(s)/chip, ICI {c.ici_bidir / 1e9:.0f} GB/s, clock "
                f"{c.clock / 1e9:.3f} GHz (derived)\n       {c.sources}"
            )
        return
    if ns.cmd == "analyse":
        chip = chip_for(ns.chip)
        if os.path.exists(os.path.join(ns.dump, "meta.json")):  # kept by --keep
            res = reanalyse(ns.dump, chip.name, select=ns.select, everything=ns.all)
        else:
            res = dict(
                target=ns.dump, kernels=[analyse(p) for p in load_dump(ns.dump, chip, ns.select, ns.all)]
            )
        print(report(res))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that run() kills the child
    params = {k: _value(v) for k, v in (p.split("=", 1) for p in ns.param)}
    for topo in ns.topology:
        res = measure(
            ns.target,
            topo,
            params,
            flags=ns.flags,
            keep=ns.keep,
            timeout=ns.timeout,
            trace_seconds=ns.trace_seconds,
            select=ns.select,
            everything=ns.all,
        )
        print(report(res, loops=not ns.no_loops), flush=True)
        if ns.json:
            with open(ns.json, "a") as f:
                f.write(json.dumps(res) + "\n")


if __name__ == "__main__":
    main()
