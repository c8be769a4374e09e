"""Compile a case for a topology in a child process, with the schedule dumped, and analyse every kernel in it."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.tpu_static.analysis import analyse
from bench.tpu_static.chips import Chip, chip_for
from bench.tpu_static.dump import load_dump
from bench.tpu_static.program import Program

DUMP_FLAGS = (
    "--xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=true "
    "--xla_jf_emit_annotations=true "
    "--xla_jf_dump_llo_pass_label_regex=final|assembly|static-bundle-profile"
)


ROOT = Path(__file__).parents[2]


def _json(path: str) -> dict:
    return json.loads(Path(path).read_text())


def _compile(
    target: str, topology: str, params: dict, workdir: str, flags: str, timeout: float, python: str
) -> dict:
    os.makedirs(workdir, exist_ok=True)
    spec: dict = dict(
        target=target, topology=topology, params=params, meta=os.path.join(workdir, "meta.json")
    )
    path = os.path.join(workdir, "spec.json")
    Path(path).write_text(json.dumps(spec))
    init = f"--xla_jf_dump_to={workdir}/llo {DUMP_FLAGS} {flags}"
    env = dict(
        os.environ,
        LIBTPU_INIT_ARGS=init,
        TPU_SKIP_MDS_QUERY="1",
        JAX_PLATFORMS="cpu",
        TPU_ACCELERATOR_TYPE=os.environ.get("TPU_ACCELERATOR_TYPE", "v5litepod-4"),
        TPU_WORKER_HOSTNAMES="localhost",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_LOG_DIR="disabled",
        PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        TF_CPP_MIN_LOG_LEVEL="3",
    )
    try:
        r = subprocess.run(
            [python, "-m", "bench.tpu_static.worker", path],
            env=env,
            timeout=timeout,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        tail = r.stdout[-3000:]
    except subprocess.TimeoutExpired:
        tail = f"timed out after {timeout} s"
    meta = _json(spec["meta"]) if os.path.exists(spec["meta"]) else {}
    if "compile_s" not in meta and "error" not in meta:
        meta["error"] = tail
    return meta


def _scalars_for(prog: Program, scal: dict[str, list], known: list) -> dict[int, list]:
    """Operand values for one kernel: the caller's {kernel regex: [array, ...]} (integer
    inputs in operand order) if given, else what the worker worked out."""

    def clean(s):
        return re.sub(r"[^A-Za-z0-9]", "_", s)

    name = clean(re.sub(r"\.\d+$", "", prog.name))
    hits = [vals for label, vals in known if clean(label) == name] or [
        vals for label, vals in known if name.startswith(clean(label))
    ]
    if not hits and len(known) == 1:  # an unnamed pallas_call takes its jit's name
        hits = [known[0][1]]
    if hits and not any(re.search(p, prog.name) for p in scal):
        num = re.search(r"\.(\d+)$", prog.name)
        pick = hits[min(int(num.group(1)) - 1, len(hits) - 1)] if num and len(hits) > 1 else hits[0]
        return {int(k): v for k, v in pick.items()}
    for pat, arrays in scal.items():
        if re.search(pat, prog.name):
            ints = [
                i
                for i, o in sorted(prog.operands.items())
                if o["kind"] == "input" and o["dtype"] in ("s32", "u32")
            ]
            return dict(zip(ints, arrays, strict=False))
    return {}


def _analyse_dump(
    dump: str,
    chip: Chip,
    meta: dict,
    select: str | None = None,
    everything: bool = False,
    trace_seconds: float = 120,
) -> list[dict]:
    kernels = []
    for prog in load_dump(dump, chip, select or meta.get("select"), everything):
        for label, known in ({None: meta.get("known") or []} | (meta.get("known_variants") or {})).items():
            k = analyse(
                prog,
                _scalars_for(prog, meta.get("scalars") or {}, known),
                max_seconds=trace_seconds,
                flops=meta.get("flops") if label is None else None,
            )
            k["variant"] = label
            kernels.append(k)
    for key in ("scalars", "known", "known_variants"):
        meta.pop(key, None)
    return kernels


def reanalyse(work: str, chip_name: str, **kw) -> dict:
    """A folder kept by measure(keep=...): analyse again without compiling."""
    meta = _json(os.path.join(work, "meta.json"))
    spec = _json(os.path.join(work, "spec.json"))
    ks = _analyse_dump(work + "/llo", chip_for(chip_name), meta, **kw)
    return dict(
        target=spec["target"], topology=spec["topology"], params=spec["params"], compile=meta, kernels=ks
    )


def measure(
    target: str,
    topology: str,
    params: dict | None = None,
    *,
    flags: str = "",
    keep: str | None = None,
    timeout: float = 600,
    trace_seconds: float = 120,
    select: str | None = None,
    everything: bool = False,
    python: str = sys.executable,
) -> dict:
    """Compile target ('file.py:case') for topology in a child process and report."""
    work = keep or tempfile.mkdtemp(prefix="tpu_static_")
    shutil.rmtree(work, ignore_errors=True)
    try:
        meta = _compile(target, topology, params or {}, work, flags, timeout, python)
        chip = chip_for(topology)
        return dict(
            target=target,
            topology=topology,
            params=params or {},
            compile=meta,
            kernels=_analyse_dump(work + "/llo", chip, meta, select, everything, trace_seconds),
        )
    finally:
        if not keep:
            shutil.rmtree(work, ignore_errors=True)
