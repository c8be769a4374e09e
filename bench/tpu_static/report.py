"""The result of a measurement as text."""


def _mb(x):
    return f"{x / 2**20:.2f} MiB"


def report(res: dict, loops: bool = True) -> str:
    c = res.get("compile", {})
    out = [f"{res.get('target', '')}  {res.get('topology', '')}  {res.get('params', '')}"]
    if c.get("error"):
        e = c["error"]
        out.append("COMPILE ERROR: " + (e if len(e) < 900 else e[:450] + " ... " + e[-450:]))
    if c.get("compile_s") is not None:
        out.append(
            f"lower {c['lower_s']} s, compile {c['compile_s']} s; XLA cost_analysis "
            f"{c.get('cost_analysis')}; per device "
            f"{ {k: v for k, v in (c.get('memory_analysis') or {}).items() if v} }"
        )
    for k in res["kernels"]:
        out.append(
            f"\n== {k['kernel']} ({k['chip']}) "
            + (f"variant {k['variant']} " if k.get("variant") else "")
            + "=="
        )
        out.append(
            f"bundles {k['bundles']}   VMEM {_mb(k['vmem_bytes'])} of "
            f"{_mb(k['vmem_capacity'])}   vector fills/spills "
            f"{k['spills']['vector_fill']}/{k['spills']['vector_spill']}, scalar spills "
            f"{k['spills']['scalar_spill']}"
        )
        out.append(
            "MXU instructions: " + (", ".join(f"{v} {n}" for n, v in k["mxu_instructions"].items()) or "none")
        )
        if "trace_error" in k:
            out.append("trace failed: " + k["trace_error"])
        if "trace" in k:
            t, u = k["trace"], k["time_us"]
            out.append(
                f"executed bundles {t['executed_bundles']:,} + MXU stalls "
                f"{t['mxu_stall_cycles']:,} = compute {t['compute_cycles']:,} cycles; "
                f"DMA stalls {t['dma_stall_cycles']:,} -> total {t['total_cycles']:,}"
                + (" (TRUNCATED)" if t["truncated"] else "")
            )
            out.append(
                f"MXU occupancy {t['mxu_occupancy']:.1%} of total, "
                f"{t['mxu_occupancy_compute']:.1%} of compute   slots: "
                + ", ".join(f"{n} {v:.0%}" for n, v in t["slot_use"].items() if v)
            )
            out.append(
                f"HBM read {t['hbm_read']:,} B, write {t['hbm_write']:,} B   DMA: "
                + ", ".join(
                    f"{n} x{v['count']} {v['bytes']:,} B (min run {v['min_contiguous']})"
                    for n, v in t["dma"].items()
                )
            )
            out.append(
                f"time: compute {u['compute']} us, HBM {u['hbm']} us -> roofline "
                f"{u['roofline']} us ({u['bound']}-bound); simulated {u['simulated']} us"
                + (
                    f"; ideal for {c.get('flops'):.3g} FLOP at bf16 peak {u['flops_ideal_bf16']} us"
                    if "flops_ideal_bf16" in u
                    else ""
                )
            )
            if t["unknown_branches"] or t["unsatisfied_waits"] or t["unmodelled_ops"]:
                out.append(
                    f"caution: {t['unknown_branches']} branches on unknown values "
                    f"{t['unknown_at']}, "
                    f"{t['unsatisfied_waits']} waits never satisfied, unmodelled "
                    f"{t['unmodelled_ops']}"
                )
        for w in k["warnings"]:
            out.append("warning: " + w)
        if loops:
            for lp in k["loops"]:
                out.append(
                    "  " * lp["depth"] + f"  {lp['id']}: {lp['bundles']} bundles "
                    f"(own {lp['own_bundles']}), entries {lp['entries']}, trips "
                    + (f"{lp['trips']:.1f}" if lp["trips"] is not None else "?")
                    + (
                        f", executed/iter {lp.get('bundles_per_iteration')}"
                        if lp.get("bundles_per_iteration")
                        else ""
                    )
                    + f", matmul-issue {lp.get('matmul_issue_fraction', 0):.0%}"
                    + (
                        f", fills {lp['fills']} spills {lp['spills']}"
                        if lp.get("fills") or lp.get("spills")
                        else ""
                    )
                )
    if not res["kernels"]:
        out.append("no kernel found in the dump")
    return "\n".join(out)
