"""All numbers of one kernel: cycles, stalls, occupancy, spills, HBM bytes, times."""

import re
from typing import Any

from bench.tpu_static.machine import Machine, mxu_cost
from bench.tpu_static.program import Program


def analyse(
    prog: Program,
    scalars: dict[int, Any] | None = None,
    run: bool = True,
    max_seconds: float = 120.0,
    flops: float | None = None,
) -> dict:
    """All numbers for one kernel, as a JSON-able dict."""
    chip = prog.chip
    n = len(prog.bundles)
    cores = 2 if chip.megacore else 1
    out: dict[str, Any] = dict(
        kernel=prog.name,
        chip=chip.name,
        bundles=n,
        operands=[
            dict(index=i, **{k: v for k, v in o.items() if k != "reg"})
            for i, o in sorted(prog.operands.items())
        ],
    )
    static = prog.slot_sum(0, n - 1) if prog.slots else {}
    out["spills"] = dict(
        vector_fill=int(static.get("VLOAD:FILL", 0)),
        vector_spill=int(static.get("VSTORE:SPILL", 0)),
        scalar_spill=sum(
            1 for b in prog.bundles for i in b.instrs if i.op == "sst" and "_spill" in i.args[0]
        ),
    )
    vm = [a for a in prog.allocs.values() if a["space"] == "vmem"]
    out["vmem_bytes"] = sum(a["bytes"] for a in vm)
    out["vmem_capacity"] = chip.vmem_per_core
    out["vmem_allocs"] = [
        dict(shape=a["shape"], bytes=a["bytes"], tag=a["tag"])
        for a in sorted(vm, key=lambda a: -a["bytes"])[:8]
    ]
    out["warnings"] = list(prog.warnings)
    mm: dict[str, int] = {}
    for b in prog.bundles:
        for i in b.instrs:
            if i.op.startswith(("vmatmul", "vmatpush")):
                key = re.sub(r"\[\d+\]", "", i.op)
                mm[key] = mm.get(key, 0) + 1
    out["mxu_instructions"] = mm
    machines = []
    if run:
        try:
            for core in range(cores):
                m = Machine(prog, scalars or {}, core=core, max_seconds=max_seconds)
                m.run()
                machines.append(m)
            if cores == 2:  # Megacore, but is the work split?
                moved = [sum(v[1] for v in x.dma.values()) for x in machines]
                if min(moved) < 0.1 * max(moved):  # no: one core has the HBM to itself
                    k = moved.index(max(moved))
                    machines[k] = Machine(prog, scalars or {}, core=k, hbm_share=1.0, max_seconds=max_seconds)
                    machines[k].run()
                    out["one_core_only"] = True
        except Exception as ex:  # report, never hide
            out["trace_error"] = f"{type(ex).__name__}: {ex}"
    if machines and "trace_error" not in out:
        m = max(machines, key=lambda x: x.T[0])
        executed = sum(m.counts)
        busy = [0.0] * chip.mxus
        push = [0.0] * chip.mxus
        for i, b in enumerate(prog.bundles):
            if m.counts[i]:
                for ins in b.instrs:
                    if ins.mxu is not None and (c := mxu_cost(ins.op, chip)):
                        (busy if c[0] == "matmul" else push)[ins.mxu % chip.mxus] += c[1] * m.counts[i]
        dyn = prog.slot_sum(0, n - 1, m.counts) if prog.slots else {}
        dmas: dict[str, list] = {}
        for x in machines:
            for k, (c, by, r) in x.dma.items():
                d = dmas.setdefault(k, [0, 0, None])
                d[0] += c
                d[1] += by
                if r is not None:
                    d[2] = r if d[2] is None else min(d[2], r)
        hbm_read = sum(v[1] for k, v in dmas.items() if k.startswith("hbm_to"))
        hbm_write = sum(v[1] for k, v in dmas.items() if k.endswith("to_hbm"))
        compute = executed + m.stall_mxu
        total = m.T[0]
        t_comp = compute / chip.clock
        t_hbm = (hbm_read + hbm_write) / chip.hbm_bw_device
        out["trace"] = dict(
            cores=cores,
            truncated=any(x.truncated for x in machines),
            executed_bundles=executed,
            mxu_stall_cycles=round(m.stall_mxu),
            compute_cycles=round(compute),
            dma_stall_cycles=round(m.stall_dma),
            total_cycles=round(total),
            mxu_busy_cycles=round(max(busy)),
            mxu_push_cycles=round(max(push)),
            mxu_occupancy=round(sum(busy) / (chip.mxus * total), 4) if total else 0,
            mxu_occupancy_compute=round(sum(busy) / (chip.mxus * compute), 4) if compute else 0,
            slot_use={
                k: round(v / (executed * c), 4) if executed else 0
                for (k, v), c in zip(dyn.items(), prog.slot_caps, strict=False)
            },
            dma={k: dict(count=v[0], bytes=v[1], min_contiguous=v[2]) for k, v in dmas.items()},
            hbm_read=hbm_read,
            hbm_write=hbm_write,
            unknown_branches=sum(x.unknown_branches for x in machines),
            unknown_at={hex(k): v for x in machines for k, v in x.unknown_at.items()},
            unsatisfied_waits=sum(sum(x.unsatisfied.values()) for x in machines),
            unmodelled_ops={k: v for x in machines for k, v in x.unmodelled.items()},
        )
        out["time_us"] = dict(
            compute=round(t_comp * 1e6, 3),
            hbm=round(t_hbm * 1e6, 3),
            roofline=round(max(t_comp, t_hbm) * 1e6, 3),
            simulated=round(total / chip.clock * 1e6, 3),
            bound="compute" if t_comp >= t_hbm else "hbm",
        )
        if flops:
            ideal = flops / (chip.flops_per_cycle_core * chip.clock * cores)
            out["time_us"]["flops_ideal_bf16"] = round(ideal * 1e6, 3)
        weights = m.counts
    else:
        weights = None
    loops = []
    for lp in prog.loops:
        child = sum(
            prog.loops[j].tail - prog.loops[j].head + 1
            for j in range(len(prog.loops))
            if (parent := prog.loops[j].parent) is not None and prog.loops[parent] is lp
        )
        entry = dict(
            id=lp.id,
            depth=lp.depth,
            bundles=lp.tail - lp.head + 1,
            own_bundles=lp.tail - lp.head + 1 - child,
            entries=lp.entries,
            trips=lp.trips,
            trips_from=lp.trips_from,
        )
        if prog.slots:
            s = prog.slot_sum(lp.head, lp.tail)
            entry["matmul_issue_fraction"] = round(
                sum(1 for i in range(lp.head, lp.tail + 1) if prog.slots[i][prog.slot_names.index("MATMUL")])
                / (lp.tail - lp.head + 1),
                4,
            )
            entry["fills"], entry["spills"] = (int(s.get("VLOAD:FILL", 0)), int(s.get("VSTORE:SPILL", 0)))
        if weights is not None:
            tot = sum(weights[lp.head : lp.tail + 1])
            entry["executed_bundles"] = tot
            it = (lp.entries or 0) * (lp.trips or 0)
            entry["bundles_per_iteration"] = round(tot / it, 1) if it else None
        loops.append(entry)
    out["loops"] = loops
    return out
