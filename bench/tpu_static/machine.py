"""Executes the scalar side of a schedule and keeps time: addresses, loops, DMAs, semaphores, matrix units."""

import functools
import re
import time
from typing import Any

from bench.tpu_static.chips import DMA_STEP, GRANULE, Chip
from bench.tpu_static.program import Instr, Program

_F8_AS_BF16 = re.compile(r"\.(?:f8\w+|bf8|if8)\.bf16")


@functools.cache
def mxu_cost(op: str, chip: Chip) -> tuple[str, int] | None:
    """('matmul'|'push', cycles one MXU is taken), after libtpu's own slot capacities."""
    wide = 2 if chip.mxu_dim == 256 else 1
    if op.startswith("vmatmul"):
        if ".f32" in op:
            return "matmul", 8 // wide  # 8 rows
        if _F8_AS_BF16.search(op):  # 32 rows, at the bf16 rate (v5, v6e)
            return "matmul", 32 // wide
        return "matmul", 16 // wide  # 16 bf16, 32 8-bit or 64 4-bit rows
    if op.startswith("vmatpush"):
        return "push", 2 if ".f32" in op else 4
    return None


class _Unknown:
    """A scalar whose value the tool cannot know (it came from the vector side)."""

    def _op(self, *_):
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _op
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _op
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _op
    __neg__ = __invert__ = __floordiv__ = __mod__ = _op
    __lt__ = __le__ = __gt__ = __ge__ = _op

    def __eq__(self, other):
        return self

    def __ne__(self, other):
        return self

    __hash__ = object.__hash__

    def __bool__(self):
        return False

    def __repr__(self):
        return "?"


UNK = _Unknown()
_M = 0xFFFFFFFF
_BIG = 1 << 40  # HBM operand pointers live above this, unwrapped


def _hbm_base(index: int) -> int:
    """Pointer to HBM operand `index`; the 0xA5 tag tells a pointer from one shifted left 4
    (v5e turns granule pointers into byte-like ones before a DMA)."""
    return ((index << 8) | 0xA5) << 44


def _hbm_split(ptr: int) -> tuple[int, int]:
    """(operand index, offset in 4-byte words)."""
    if (ptr >> 44) & 0xFF != 0xA5 and (ptr >> 48) & 0xFF == 0xA5:
        ptr >>= 4
    return ptr >> 52, (ptr & ((1 << 44) - 1)) * GRANULE // 4


def _s32(x):
    if x is UNK or x >= _BIG:
        return x
    x &= _M
    return x - (1 << 32) if x & 0x80000000 else x


def _u(x):
    return x if x is UNK or x >= _BIG else x & _M


def _shl(a, n):
    if a is UNK or n is UNK:
        return UNK
    return _s32(a << (n & 31))


def _shr(a, n):
    if a is UNK or n is UNK:
        return UNK
    return _s32((a & _M) >> (n & 31))


def _sar(a, n):
    if a is UNK or n is UNK:
        return UNK
    return a >> (n & 31)


def _mul(a, b):
    if a is UNK or b is UNK:
        return UNK
    return _s32(a * b)


def _mulhi(a, b):
    if a is UNK or b is UNK:
        return UNK
    return _s32(((a & _M) * (b & _M)) >> 32)


class Machine:
    """Executes the scalar side of a Program and keeps time."""

    def __init__(
        self,
        prog: Program,
        operands: dict[int, Any],
        core: int = 0,
        max_seconds: float = 120.0,
        hbm_share: float | None = None,
    ):
        hbm_share = hbm_share or 1 / prog.chip.cores
        self.p, self.chip = prog, prog.chip
        self.operands = operands
        self.core = core
        self.max_seconds = max_seconds
        # bytes per cycle this core gets: its share of the published HBM bandwidth, capped by
        # what libtpu's model lets one DMA have
        self.bpc = min(prog.chip.hbm_bw * hbm_share / prog.chip.clock, prog.chip.dma_rate)
        self.sm: dict[int, Any] = {}
        self.vreg: dict[str, int] = {}
        self.alloc_base: dict[str, int] = {}
        self.T = [0.0]
        self.chan = 0.0  # HBM channel busy until
        self.flags: dict[int, float] = {}
        self.pending: dict[int, list] = {}
        self.dma: dict[str, list] = {}  # kind -> [count, bytes, smallest run]
        self.stall_dma = 0.0
        self.stall_mxu = 0.0
        self.unsatisfied: dict[str, int] = {}
        self.unmodelled: dict[str, int] = {}
        self.unknown_branches = 0
        self.unknown_at: dict[int, int] = {}
        self.counts: list[int] = []
        self.truncated = False

    # -- addresses
    def base(self, alloc: str) -> int:
        if alloc not in self.alloc_base:
            self.alloc_base[alloc] = (len(self.alloc_base) + 1) << 22
            tag = self.p.allocs.get(alloc, {}).get("tag", "")
            if "core index" in tag:
                self.sm[self.alloc_base[alloc]] = self.core
        return self.alloc_base[alloc]

    def expr(self, tok: str) -> str:
        """Python source for an operand."""
        tok = tok.strip()
        if tok.startswith("[smem:"):
            tok = tok[6:-1].strip()
        if tok.startswith("[") and tok.endswith("]"):
            tok = tok[1:-1]
        parts = [t.strip() for t in tok.split("+")]
        if len(parts) > 1:
            return "(" + "+".join(self.expr(t) for t in parts) + ")"
        tok = parts[0]
        if tok.startswith("#"):
            return str(self.base(tok[1:]))
        if tok.startswith("%"):
            return f"V[{self.reg(tok)}]"
        tok = tok.lstrip("$")
        try:
            return str(_s32(int(tok, 0)))
        except ValueError:
            return "UNK"

    def reg(self, name: str) -> int:
        if name not in self.vreg:
            self.vreg[name] = len(self.vreg)
        return self.vreg[name]

    # -- events called from generated code
    def do_branch(self, cond, where):
        if cond is UNK:
            self.unknown_branches += 1
            self.unknown_at[where] = self.unknown_at.get(where, 0) + 1
            return False
        return bool(cond)

    def do_dma(self, kind, size, flag, src, dst, run):
        nbytes: Any = UNK if size is UNK else (size & _M) * GRANULE
        if nbytes is UNK:
            self.unmodelled["dma of unknown size"] = self.unmodelled.get("dma of unknown size", 0) + 1
            nbytes = 0
        rec = self.dma.setdefault(kind, [0, 0, None])
        rec[0] += 1
        rec[1] += nbytes
        if run is not None and run is not UNK:
            r = run * DMA_STEP
            rec[2] = r if rec[2] is None else min(rec[2], r)
        now = self.T[0]
        lat = self.chip.dma_latency_write if kind.endswith("to_hbm") else self.chip.dma_latency_read
        if "hbm" in kind:
            begin = max(now, self.chan)
            self.chan = begin + nbytes / self.bpc
            done = self.chan + lat
        else:
            done = now + lat + nbytes / (self.bpc * 4)
        if kind.endswith("_to_smem"):
            self._to_smem(src, dst, nbytes)
        if flag is not None and flag is not UNK:
            units = 0 if size is UNK else (size & _M)
            self.pending.setdefault(flag, []).append((done, units))

    def _to_smem(self, src, dst, nbytes):
        if src is UNK or dst is UNK:
            return
        idx, off = _hbm_split(src)
        data = self.operands.get(idx)
        if data is None:
            return
        for k in range(nbytes // 4):
            if off + k < len(data):
                self.sm[dst + k] = int(data[off + k])

    def do_wait(self, flag, n, where):
        if flag is UNK or n is UNK:
            return
        n = n & _M
        have = self.flags.get(flag, 0)
        q = self.pending.get(flag, [])
        now = self.T[0]
        while have < n and q:
            done, units = q.pop(0)
            have += units
            if done > now:
                self.stall_dma += done - now
                now = done
        self.flags[flag] = have
        if have < n:
            self.unsatisfied[where] = self.unsatisfied.get(where, 0) + 1
            self.flags[flag] = n
        self.T[0] = now

    def do_add(self, flag, n):
        if flag is UNK or n is UNK:
            return
        self.flags[flag] = self.flags.get(flag, 0) + _s32(n)

    def do_set(self, flag, n):
        if flag is UNK:
            return
        self.flags[flag] = 0 if n is UNK else n
        self.pending[flag] = []

    # -- per-bundle extra cycles from MXU pressure inside a straight run of bundles
    def mxu_schedule(self, lo: int, hi: int) -> list[int]:
        """Stall cycles added before each bundle of [lo, hi): in-order issue, one matmul
        pipe and one weight-push pipe per MXU, results popped in order."""
        chip, t = self.chip, 0
        free: dict[tuple[int, str], int] = {}
        ready: dict[Any, int] = {}
        fifo: dict[int, list[int]] = {}
        pops = {k: 0 for k in range(8)}
        mms = {k: 0 for k in range(8)}
        for i in range(lo, hi):
            for ins in self.p.bundles[i].instrs:
                if ins.mxu is None:
                    continue
                if ins.op.startswith("vmatmul"):
                    mms[ins.mxu] += 1
                elif ins.op.startswith("vpop") and "mrf" in ins.op:
                    pops[ins.mxu] += 1
        per = {k: (pops[k] / mms[k] if mms[k] else 0) for k in pops}
        credit = {k: 0.0 for k in pops}
        extra = []
        for i in range(lo, hi):
            want = t
            for ins in self.p.bundles[i].instrs:
                if ins.mxu is None:
                    continue
                cost = mxu_cost(ins.op, chip)
                if cost:
                    want = max(want, free.get((ins.mxu, cost[0]), 0))
                elif ins.op.startswith("vpop"):
                    slot = re.search(r"mrb\[(\d+)\]", ins.op)
                    if slot:
                        key = (ins.mxu, int(slot.group(1)) & ~3)
                        want = max(want, ready.get(key, 0))
                    elif fifo.get(ins.mxu):
                        want = max(want, fifo[ins.mxu].pop(0))
            for ins in self.p.bundles[i].instrs:
                if ins.mxu is None:
                    continue
                cost = mxu_cost(ins.op, chip)
                if not cost:
                    continue
                free[(ins.mxu, cost[0])] = want + cost[1]
                if cost[0] == "matmul":
                    slot = re.search(r"mrb\[(\d+)\]", ins.op)
                    if slot:
                        ready[(ins.mxu, int(slot.group(1)) & ~3)] = want + chip.pop_latency
                    else:
                        credit[ins.mxu] += per[ins.mxu]
                        while credit[ins.mxu] >= 1:
                            fifo.setdefault(ins.mxu, []).append(want + chip.pop_latency)
                            credit[ins.mxu] -= 1
            extra.append(want - t)
            t = want + 1
        return extra

    # -- code generation
    def build(self) -> None:
        p = self.p
        n = len(p.bundles)
        self.phys = sorted(
            {m for b in p.bundles for i in b.instrs if i.op == "sphi" for m in [i.dst.rsplit("_", 1)[-1]]}
        )
        phys_ix = {r: k for k, r in enumerate(self.phys)}
        phi_src = {a for b in p.bundles for i in b.instrs if i.op == "sphi" for a in i.args}
        phi_dst = {i.dst for b in p.bundles for i in b.instrs if i.op == "sphi"}

        leaders = {0}
        ends: dict[int, tuple[int, int]] = {}  # block end (exclusive) -> (branch, target)
        for i, (target, slots) in p.branch.items():
            leaders.add(target)
            leaders.add(i + slots + 1)
            ends[i + slots + 1] = (i, target)
        leaders = sorted(x for x in leaders if x < n)
        self.leaders = leaders
        self.blocks = list(zip(leaders, [*leaders[1:], n], strict=False))
        block_of = {lo: k for k, (lo, _) in enumerate(self.blocks)}
        src = []
        self.block_mxu = []
        for k, (lo, hi) in enumerate(self.blocks):
            extra = self.mxu_schedule(lo, hi)
            self.block_mxu.append(sum(extra))
            out = [f"def f{k}():"]
            acc = 0  # cycles since the last T update
            open_branch = False
            for j in range(lo, hi):
                b = p.bundles[j]
                acc += extra[j - lo]
                code, event = [], False
                for ins in sorted(b.instrs, key=lambda x: x.op != "sphi"):
                    c, ev = self._gen(ins, j, phys_ix, phi_src, phi_dst)
                    code += c
                    event |= ev
                if event and acc:
                    out.append(f" T[0]+={acc}")
                    acc = 0
                out += [" " + c for c in code]
                acc += 1
                for ins in b.instrs:
                    if ins.op == "vdelay" and ins.args:
                        acc += int(ins.args[0], 0)
                if j in p.branch:
                    open_branch = True
            if acc:
                out.append(f" T[0]+={acc}")
            nxt = block_of.get(hi, -1)
            # only the branch whose delay slots end this block decides here
            if hi in ends and lo <= ends[hi][0] < hi:
                b, target = ends[hi]
                out.append(f" return {block_of[target]} if br{b} else {nxt}")
            elif hi in ends and ends[hi][0] < lo:
                b, target = ends[hi]
                out.append(f" return {block_of[target]} if G[{b}] else {nxt}")
            else:
                out.append(f" return {nxt}")
            if open_branch:  # a branch resolved in a later block
                for j in range(lo, hi):
                    if j in p.branch and j + p.branch[j][1] + 1 > hi:
                        out.insert(-1, f" G[{j}]=br{j}")
            src.append("\n".join(out))
        self.source = "\n".join(src)
        self.V = [UNK] * (len(self.vreg) + 1)
        self.P = [UNK] * (len(self.phys) + 1)
        self.G: dict[int, Any] = {}
        env: dict[str, Any] = dict(
            V=self.V,
            P=self.P,
            T=self.T,
            SM=self.sm,
            UNK=UNK,
            S=_s32,
            U=_u,
            SHL=_shl,
            SHR=_shr,
            SAR=_sar,
            MUL=_mul,
            MULHI=_mulhi,
            DMA=self.do_dma,
            TAKEN=self.do_branch,
            WAIT=self.do_wait,
            ADD=self.do_add,
            SET=self.do_set,
            G=self.G,
        )
        exec(compile(self.source, f"<{p.name}>", "exec"), env)
        self.fn = [env[f"f{k}"] for k in range(len(self.blocks))]

    def _gen(self, ins: Instr, j: int, phys_ix, phi_src, phi_dst) -> tuple[list[str], bool]:
        op, a, e = ins.op, ins.args, self.expr
        cond = None
        if ins.pred:
            cond = ("not " if ins.pred[0] else "") + e(ins.pred[1])

        def guard(lines):
            return [f"if {cond}:"] + [" " + x for x in lines] if cond else lines

        if op == "sbr.rel" or op.startswith("sbr"):
            return [f"br{j}=TAKEN({cond},{self.p.bundles[j].addr})" if cond else f"br{j}=True"], False
        if op.startswith("dma.") and op not in ("dma.done.wait", "dma.done.wait.trace"):
            kind = op[4:]
            nm = ins.named
            size = e(nm["size_in_granules"]) if "size_in_granules" in nm else "UNK"
            flag = e(nm["dst_syncflagno"]) if "dst_syncflagno" in nm else "None"
            s_space, d_space = ([*kind.split("_to_"), "?"])[:2]
            s = e(nm.get(s_space, nm.get("src", nm.get("src_address", "?"))))
            d = e(nm.get(d_space, nm.get("dst", nm.get("dst_address", "?"))))
            run = e(nm["steps_per_stride"]) if "steps_per_stride" in nm else "None"
            return guard([f"DMA({kind!r},{size},{flag},{s},{d},{run})"]), True
        if op.startswith(("dma.done.wait", "vwait.ge", "vwait.done")):
            cnt = e(a[1]) if len(a) > 1 else "1"
            return guard([f"WAIT({e(a[0])},{cnt},{self.p.bundles[j].addr})"]), True
        if op.startswith("vsyncadd"):
            return guard([f"ADD({e(a[0])},{e(a[1])})"]), True
        if op.startswith(("vsyncpa", "vsyncset")):
            return guard([f"SET({e(a[0])},{e(a[1]) if len(a) > 1 else 0})"]), True
        if op == "sst":
            return guard([f"SM[{e(a[0])}]={e(a[1])}"]), False
        kind = ins.dst[1] if len(ins.dst) > 1 and ins.dst[2:3].isdigit() else ""
        if kind not in "sp" or not kind:
            return [], False
        val = self._value(ins)
        if val is None:
            self.unmodelled[op] = self.unmodelled.get(op, 0) + 1
            val = "UNK"
        d = f"V[{self.reg(ins.dst)}]"
        ph = phys_ix.get(ins.dst.rsplit("_", 1)[-1])
        if op == "sphi":
            return [f"{d}=P[{ph}]"], False
        lines = [f"{d}={val}"]
        if cond and ins.passthru:
            lines = [f"{d}={val} if {cond} else {e(ins.passthru)}"]
            cond = None
        if ph is not None and (ins.dst in phi_src or ins.dst in phi_dst):
            lines.append(f"P[{ph}]={d}")
        return guard(lines), False

    def _value(self, ins: Instr) -> str | None:
        op, a, e = ins.op, ins.args, self.expr
        x = [e(t) for t in a] if not op.startswith("inlined_call") else []
        if op.startswith("inlined_call_operand"):
            m = re.search(r"index: (\d+), kind: (\w+)", ins.args[0])
            if not m:
                return "UNK"
            i = int(m.group(1))
            if "no memory" in ins.args[0]:  # a scalar passed in the register itself
                data = self.operands.get(i)
                return str(_s32(int(data[0]))) if data else "UNK"
            if "smem" in op:
                base = (1 << 30) + (i << 20)
                data = self.operands.get(i)
                if data is not None:
                    for k, v in enumerate(data):
                        self.sm[base + k] = int(v)
                return str(base)
            return str(_hbm_base(i))
        if op == "sphi":
            return "UNK"
        if op.startswith(("smov", "int_to_ptr", "simm")):
            return x[0]
        if op.startswith("sld"):
            return f"SM.get({x[0]},UNK)"
        if op.startswith("scalar_lea"):
            return f"({x[0]}+{x[1]})" if len(x) > 1 else x[0]
        if op == "scalar_select":
            return f"({x[1]} if {x[0]} else {x[2]})"
        two = len(x) >= 2
        simple = {
            "sadd.s32": "S({0}+{1})",
            "ssub.s32": "S({0}-{1})",
            "sand.u32": "({0}&{1})",
            "sor.u32": "({0}|{1})",
            "sxor.u32": "({0}^{1})",
            "smul.u32": "MUL({0},{1})",
            "smul.s32": "MUL({0},{1})",
            "smulhi.u32": "MULHI({0},{1})",
            "sshll.u32": "SHL({0},{1})",
            "sshrl.u32": "SHR({0},{1})",
            "sshra.s32": "SAR({0},{1})",
            "smin.s32": "min({0},{1})",
            "smax.s32": "max({0},{1})",
            "smin.u32": "min(U({0}),U({1}))",
            "smax.u32": "max(U({0}),U({1}))",
            "por": "({0} or {1})",
            "pand": "({0} and {1})",
            "pnand": "(not ({0} and {1}))",
            "pnor": "(not ({0} or {1}))",
            "pxor": "(bool({0})!=bool({1}))",
        }
        if op in simple and two:
            return simple[op].format(*x)
        if op == "pneg":
            return f"(not {x[0]})"
        if op in ("pmov", "pimm"):
            return x[0]
        m = re.match(r"scmp\.(\w\w)\.([su])32", op)
        if m and two:
            sym = dict(eq="==", ne="!=", lt="<", le="<=", gt=">", ge=">=")[m.group(1)]
            if m.group(2) == "u":
                return f"(U({x[0]}){sym}U({x[1]}))"
            return f"({x[0]}{sym}{x[1]})"
        return None

    def run(self) -> None:
        self.build()
        cnt = [0] * len(self.fn)
        edges: dict[tuple[int, int], int] = {}
        heads = {lp.head for lp in self.p.loops}
        head_blocks = {k for k, (lo, _) in enumerate(self.blocks) if lo in heads}
        fn, pc, step, prev = self.fn, 0, 0, -1
        t0 = time.time()
        while pc >= 0:
            cnt[pc] += 1
            if pc in head_blocks:
                edges[(prev, pc)] = edges.get((prev, pc), 0) + 1
            prev = pc
            pc = fn[pc]()
            step += 1
            if not step & 0x3FFF and time.time() - t0 > self.max_seconds:
                self.truncated = True
                break
        self.steps = step
        self.counts = [0] * len(self.p.bundles)
        for k, (lo, hi) in enumerate(self.blocks):
            for i in range(lo, hi):
                self.counts[i] = cnt[k]
            self.stall_mxu += cnt[k] * self.block_mxu[k]
        start_of = [lo for lo, _ in self.blocks]
        for lp in self.p.loops:
            k = next((b for b, lo in enumerate(start_of) if lo == lp.head), None)
            if k is None:
                continue
            back = sum(
                c for (s, d), c in edges.items() if d == k and s >= 0 and lp.head <= start_of[s] <= lp.tail
            )
            lp.entries = cnt[k] - back
            lp.trips = cnt[k] / lp.entries if lp.entries else 0.0
            lp.trips_from = "executed"
