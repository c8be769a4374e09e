"""The child process that compiles a case for a topology that is not here, and what it knows of the scalars."""

import contextlib
import importlib
import importlib.util
import json
import math
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

topology_devices: list = []  # set in the worker; cases may use it
topology_name = ""


def make_mesh(shape: dict[str, int]):
    """For cases: a mesh over the first devices of the topology being compiled for."""
    import numpy as np
    from jax.sharding import Mesh

    size = math.prod(shape.values())
    return Mesh(np.array(topology_devices[:size]).reshape(tuple(shape.values())), tuple(shape))


def stub_package(name: str, path: str | None = None, **attrs):
    """For cases: an importable package without running its __init__ (peers that need vllm)."""
    mod = types.ModuleType(name)
    if path:
        mod.__path__ = [path]
    for k, v in attrs.items():
        setattr(mod, k, v)
    sys.modules[name] = mod
    return mod


def _load_case(target: str):
    path, _, func = target.rpartition(":")
    if path.endswith(".py"):
        spec = importlib.util.spec_from_file_location("tpu_static_case", path)
        assert spec and spec.loader
        mod = importlib.util.module_from_spec(spec)
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
        spec.loader.exec_module(mod)
    else:
        mod = importlib.import_module(path)
    return getattr(mod, func)


def _known_operands(closed, args) -> list[tuple[str, dict[int, list]]]:
    """(kernel name, {operand index: values}) for every pallas_call, in program order.

    Integer arrays that follow from the concrete integer arguments are computed on the
    CPU; anything that depends on an abstract value stays unknown."""
    import numpy as np

    calls: list = []

    def walk(jaxpr, consts, ins):
        env: dict = {}

        def read(v):
            return v.val if hasattr(v, "val") else env.get(v)

        for v, c in zip(jaxpr.constvars, consts, strict=False):
            env[v] = c
        for v, a in zip(jaxpr.invars, ins, strict=False):
            if a is not None and tuple(np.shape(a)) != tuple(v.aval.shape):
                a = np.asarray(a)[tuple(slice(0, n) for n in v.aval.shape)]  # shard 0
            if a is not None:
                env[v] = a
        for eqn in jaxpr.eqns:
            vals = [read(v) for v in eqn.invars]
            name = eqn.primitive.name
            outs = [None] * len(eqn.outvars)
            if name == "pallas_call":
                p = eqn.params
                label = (
                    p.get("name")
                    or getattr(p.get("name_and_src_info"), "name", "")
                    or getattr(getattr(p.get("jaxpr"), "debug_info", None), "func_name", "")
                    or "?"
                )
                known = {
                    i: np.asarray(v).reshape(-1).tolist()
                    for i, v in enumerate(vals)
                    if v is not None and np.asarray(v).dtype.kind in "iub" and np.asarray(v).size < 1 << 20
                }
                calls.append((str(label), known))
            else:
                sub = next(
                    (eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params), None
                )
                inner = getattr(sub, "jaxpr", sub)
                if inner is not None and name not in ("scan", "while", "cond"):
                    outs = walk(inner, getattr(sub, "consts", ()), vals)
                elif name == "scan" and sub is not None and any(v is None for v in vals):
                    n = eqn.params["num_consts"] + eqn.params["num_carry"]
                    walk(
                        inner,
                        getattr(sub, "consts", ()),
                        vals[:n] + [None if v is None else v[0] for v in vals[n:]],
                    )
                elif (
                    all(v is not None for v in vals)
                    and sum(int(np.prod(v.aval.shape)) for v in eqn.outvars) < 1 << 22
                ):
                    try:
                        r = eqn.primitive.bind(*vals, **eqn.params)
                        outs = list(r) if eqn.primitive.multiple_results else [r]
                    except Exception:
                        pass
            for v, o in zip(eqn.outvars, outs, strict=False):
                if o is not None:
                    env[v] = o
        return [read(v) for v in jaxpr.outvars]

    walk(closed.jaxpr, closed.consts, args)
    return calls


def _worker(spec_path: str) -> None:
    spec = json.loads(Path(spec_path).read_text())
    meta: dict[str, Any] = {}

    def save():
        Path(spec["meta"]).write_text(json.dumps(meta))

    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    me: Any = importlib.import_module("bench.tpu_static.worker")  # as cases import it; this is __main__
    desc = topologies.get_topology_desc(platform="tpu", topology_name=spec["topology"])
    me.topology_devices, me.topology_name = list(desc.devices), spec["topology"]
    d0 = desc.devices[0]
    meta.update(device_kind=d0.device_kind, num_devices=len(desc.devices))
    # library code that asks "which TPU am I on" must see the target, not the host
    jax.devices = lambda *a, **k: list(desc.devices)
    jax.local_devices = lambda *a, **k: list(desc.devices)
    try:
        from jax._src import tpu_info

        tpu_info.get_device_kind = lambda: d0.device_kind
        tpu_info.get_num_device_cores = lambda: d0.num_cores
    except Exception:
        pass
    case = _load_case(spec["target"])(**spec["params"])
    fn, args, kwargs = case["fn"], tuple(case["args"]), dict(case.get("kwargs", {}))
    one = Mesh(np.array([d0]), ("tpu_static",))

    def place(x):
        if isinstance(x, jax.ShapeDtypeStruct) and getattr(x, "sharding", None) is None:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(one, PartitionSpec()))
        return x

    scal = {k: [np.asarray(v).reshape(-1).tolist() for v in vs] for k, vs in case.get("scalars", {}).items()}
    meta.update(
        scalars=scal,
        select=case.get("select"),
        flops=case.get("flops"),
        note=case.get("note"),
        ideal=case.get("ideal"),
    )
    save()
    # concrete integer arguments: abstract for the compiler, known to the trace
    concrete = jax.tree.leaves((args, kwargs))
    concrete = [x if isinstance(x, np.ndarray) else None for x in concrete]
    args, kwargs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, np.ndarray) else x, (args, kwargs)
    )
    if not case.get("multi_device"):
        args, kwargs = jax.tree.map(place, (args, kwargs))
    try:
        t = time.time()
        jitted = fn if hasattr(fn, "lower") and not case.get("jit") else jax.jit(fn, **case.get("jit", {}))
        ctx = (
            jax.sharding.use_abstract_mesh(one.abstract_mesh)
            if not case.get("multi_device") and case.get("abstract_mesh", True)
            else contextlib.nullcontext()
        )
        with ctx:
            traced = jitted.trace(*args, **kwargs)
            low = traced.lower(lowering_platforms=("tpu",))
        if any(x is not None for x in concrete):
            try:
                meta["known"] = _known_operands(traced.jaxpr, concrete)
                # same compiled kernel, other integer inputs: {label: [int arrays in order]}
                for label, ints in case.get("variants", {}).items():
                    it = iter(ints)
                    vals = [np.asarray(next(it)) if x is not None else None for x in concrete]
                    meta.setdefault("known_variants", {})[label] = _known_operands(traced.jaxpr, vals)
            except Exception as ex:
                meta["known_error"] = f"{type(ex).__name__}: {str(ex)[:500]}"
        meta["lower_s"] = round(time.time() - t, 2)
        t = time.time()
        comp = low.compile()
        meta["compile_s"] = round(time.time() - t, 2)
        ca = comp.cost_analysis() or {}
        meta["cost_analysis"] = {
            k: float(v)
            for k, v in ca.items()
            if k in ("flops", "bytes accessed", "optimal_seconds", "transcendentals")
        }
        ma = comp.memory_analysis()
        meta["memory_analysis"] = (
            {k: int(getattr(ma, k)) for k in dir(ma) if k.endswith("_in_bytes")} if ma else None
        )
    except Exception as ex:
        meta["error"] = f"{type(ex).__name__}: {str(ex)[:4000]}"
    save()


if __name__ == "__main__":
    _worker(sys.argv[1])
