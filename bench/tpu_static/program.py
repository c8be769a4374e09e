"""The final VLIW schedule of one kernel, parsed: bundles, instructions, branches, loops, slots."""

import dataclasses
import re

from bench.tpu_static.chips import Chip

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s*((?:[A-Z]{2} ?)*)\s*:\s*((?:> ?)*)\s*\{")
_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_REGION = re.compile(r"(Start/End empty|Start|End) region (\d+)")
_NAMED = re.compile(r"/\*(\w+)=\*/\s*([^,;}/]+)")
_INSTR = re.compile(r"^(%[\w.\-]+)\s*=\s*([\w.\-]+)(.*)$", re.S)
_PRED = re.compile(r"\((!?)(%p\w+)(?:,\s*(%?[\w]+))?\)")
_MXU = re.compile(r"\.mxu(\d)$")


@dataclasses.dataclass
class Instr:
    dst: str
    op: str
    args: list[str]
    pred: tuple[bool, str] | None  # (negated, register)
    passthru: str | None  # value kept when the predicate is false
    named: dict[str, str]
    mxu: int | None = None


@dataclasses.dataclass
class Bundle:
    addr: int
    label: str
    depth: int
    instrs: list[Instr]
    starts: list[int]  # regions that start here
    ends: list[int]  # regions that end here


@dataclasses.dataclass
class Loop:
    id: str
    head: int  # bundle indices, inclusive
    tail: int
    depth: int
    parent: int | None = None
    trips: float | None = None  # mean iterations per entry
    entries: int | None = None
    trips_from: str = "unknown"


def _split_args(text: str) -> list[str]:
    out, depth, cur = [], 0, ""
    for ch in text:
        if ch in "[(":
            depth += 1
        elif ch in "])":
            depth -= 1
        if ch == "," and depth == 0:
            out.append(cur.strip())
            cur = ""
        else:
            cur += ch
    if cur.strip():
        out.append(cur.strip())
    # "%s1_s2 [#allocation3]" is an operand followed by its provenance
    return [a.split()[0] if a and a[0] in "%0123456789-" else a for a in out]


def parse_instr(raw: str) -> Instr | None:
    named = {k: v.strip() for k, v in _NAMED.findall(raw)}
    text = _COMMENT.sub(" ", raw).strip()
    m = _INSTR.match(text)
    if not m:
        return None
    dst, op, rest = m.groups()
    mm = _MXU.search(op)
    if mm is None:  # "...gmra.mrb[60].mxu1" has a bracket
        bracket = re.match(r"\[(\d+)\]\.mxu(\d)", rest)
        if bracket:
            mxu, rest = int(bracket.group(2)), rest[bracket.end() :]
            op += f"[{bracket.group(1)}]"
        else:
            mxu = None
    else:
        mxu, op = int(mm.group(1)), op[: mm.start()]
    rest = re.sub(r"\[(?:thread|resolvable):[^\]]*\]", " ", rest)
    pred = passthru = None
    pm = _PRED.search(rest)
    if pm:
        pred, passthru = (pm.group(1) == "!", pm.group(2)), pm.group(3)
        rest = rest[: pm.start()] + rest[pm.end() :]
    rest = rest.strip().lstrip(",")
    if op.startswith("inlined_call_operand"):
        return Instr(dst, op, [rest], None, None, named)
    if op.startswith("dma."):  # "dma.general ... /* hbm-to-vmem */"
        way = re.search(r"/\*\s*([\w-]+?)-to-([\w-]+?)\s*\*/", raw)
        if way:
            op = f"dma.{way.group(1)}_to_{way.group(2)}".replace("-", "_")
    if op == "sst":  # no comma between address and value
        rest = re.sub(r"\]\]\s*,?", "]], ", rest, count=1)
    return Instr(dst, op, _split_args(rest), pred, passthru, named, mxu)


class Program:
    """One kernel: its final bundles, slot use, allocations, loops and branches."""

    def __init__(
        self,
        name: str,
        listing: str,
        chip: Chip,
        utilization: str | None = None,
        allocations: str | None = None,
        assembly: str | None = None,
    ):
        self.name, self.chip = name, chip
        self.bundles: list[Bundle] = []
        self.entry_comment = ""
        self._parse(listing)
        self.index = {b.addr: i for i, b in enumerate(self.bundles)}
        self.region = {}
        for i, b in enumerate(self.bundles):
            for r in b.starts:
                self.region.setdefault(r, i)
        self.slot_names, self.slot_caps, self.slots = [], [], []
        if utilization:
            self._parse_slots(utilization)
        self.allocs = self._parse_allocs(allocations) if allocations else {}
        self.operands = self._parse_operands()
        self.warnings: list[str] = []
        self._branches(assembly)
        self._loops()

    # -- parsing
    def _parse(self, listing: str) -> None:
        chunks: list[list[str]] = []
        for line in listing.splitlines():
            if _BUNDLE.match(line):
                chunks.append([line])
            elif chunks:
                chunks[-1].append(line)
        for lines in chunks:
            text = "\n".join(lines)
            m = _BUNDLE.match(text)
            assert m
            body = text[m.end() :]
            for c in re.findall(r"/\* ?(?:entry|exit) bundle: (.*?)\*/", body, re.S):
                self.entry_comment = c
            starts, ends = [], []
            for kind, num in _REGION.findall(body):
                (ends if kind == "End" else starts).append(int(num))
            # drop the closing brace and what follows it, outside comments
            parts = []
            for piece in body.split(";;"):
                ins = parse_instr(
                    piece.rsplit("}", 1)[0] if ";;" not in body and piece.rstrip().endswith("}") else piece
                )
                if ins:
                    if ins.args and ins.args[-1].endswith("}"):
                        ins.args[-1] = ins.args[-1].rstrip("} ").strip()
                    ins.args = [a for a in ins.args if a not in ("", "}")]
                    parts.append(ins)
            self.bundles.append(
                Bundle(int(m.group(1), 16), m.group(2).strip(), m.group(3).count(">"), parts, starts, ends)
            )

    def _parse_slots(self, text: str) -> None:
        lines = text.splitlines()
        for i, line in enumerate(lines):
            if line.startswith("== CAPA"):
                self.slot_names = [s.strip() for s in lines[i + 1].split(",")]
                self.slot_caps = [int(x) for x in lines[i + 2].split()]
            if line.startswith("== UTIL"):
                self.slots = [[int(x) for x in row.split()] for row in lines[i + 1 :] if row.strip()]
        if len(self.slots) != len(self.bundles):
            self.slots = (self.slots + [[0] * len(self.slot_names)] * len(self.bundles))[: len(self.bundles)]

    @staticmethod
    def _parse_allocs(text: str) -> dict[str, dict]:
        out = {}
        for m in re.finditer(
            r"#(allocation\d+\w*) \[shape = '([^']*)', space=(\w+), "
            r"size = (0x[0-9a-f]+|\d+)([^\]]*)\]",
            text,
        ):
            tag = re.search(r"tag = '([^']*)'", m.group(5))
            out[m.group(1)] = dict(
                shape=m.group(2), space=m.group(3), bytes=int(m.group(4), 0), tag=tag.group(1) if tag else ""
            )
        return out

    def _parse_operands(self) -> dict[int, dict]:
        ops = {}
        for b in self.bundles[:4]:
            for ins in b.instrs:
                if ins.op.startswith("inlined_call_operand"):
                    m = re.search(r"shape: (\w+)\[([\d,]*)\], index: (\d+), kind: (\w+)", ins.args[0])
                    if m:
                        dims = [int(x) for x in m.group(2).split(",") if x]
                        ops[int(m.group(3))] = dict(
                            dtype=m.group(1),
                            shape=dims,
                            kind=m.group(4),
                            space=ins.op.split(".")[-1] or "?",
                            reg=ins.dst,
                        )
        return ops

    # -- control flow
    def _branches(self, assembly: str | None) -> None:
        """branch bundle index -> (target bundle index, delay slots)."""
        self.branch: dict[int, tuple[int, int]] = {}
        where = [i for i, b in enumerate(self.bundles) if any(x.op.startswith("sbr") for x in b.instrs)]
        exact = self._delay_from_assembly(assembly, where) if assembly else {}
        variable = self.chip.branch_slots > 4
        labels = {i for i, b in enumerate(self.bundles) if b.label}
        for k, i in enumerate(where):
            ins = next(x for x in self.bundles[i].instrs if x.op.startswith("sbr"))
            m = re.search(r"region(\d+)", " ".join(ins.args))
            target = self.region.get(int(m.group(1))) if m else None
            if target is None and m:  # an empty fall-through region is not annotated:
                before = int(m.group(1)) - 1  # it follows the end of the region before it
                target = next(
                    (j + 1 for j in range(len(self.bundles) - 2, i, -1) if before in self.bundles[j].ends),
                    None,
                )
            if target is None:
                self.warnings.append(f"branch at {self.bundles[i].addr:#x}: target not found")
                continue
            slots = exact.get(i, self.chip.branch_slots)
            nxt = where[k + 1] if k + 1 < len(where) else len(self.bundles)
            if variable and i not in exact:  # TPU7x without the assembly: infer
                stop = min([j for j in labels if j > i] + [nxt, i + slots + 1])
                slots = stop - i - 1
            self.branch[i] = (target, max(0, min(slots, nxt - i - 1, len(self.bundles) - i - 1)))

    def _delay_from_assembly(self, assembly: str, where: list[int]) -> dict[int, int]:
        """TPU7x encodes the delay per branch; find this kernel inside the program."""
        sites = {}
        for m in re.finditer(
            r"^\d+:(0x[0-9a-f]+)\s*: \{\(pc\) = sbr\.rel[^,;}]*?"
            r"(?:, \$(\d+))? \(=",
            assembly,
            re.M,
        ):
            sites[int(m.group(1), 16)] = int(m.group(2)) if m.group(2) else None
        if not where or not sites or any(v is None for v in sites.values()):
            return {}
        addrs = [self.bundles[i].addr for i in where]
        for base in (s - addrs[0] for s in sites):
            if all(a + base in sites for a in addrs):
                return {i: sites[self.bundles[i].addr + base] for i in where}
        return {}

    def _loops(self) -> None:
        spans: dict[int, int] = {}
        for i, (target, slots) in self.branch.items():
            if target <= i:
                spans[target] = max(spans.get(target, 0), i + slots)
        self.loops = [Loop("", h, t, 0) for h, t in sorted(spans.items(), key=lambda x: (x[0], -x[1]))]
        for k, lp in enumerate(self.loops):
            for j in range(k - 1, -1, -1):
                if self.loops[j].head <= lp.head and self.loops[j].tail >= lp.tail:
                    lp.parent, lp.depth = j, self.loops[j].depth + 1
                    break
            lp.id = f"L{k}@{self.bundles[lp.head].addr:#x}"

    # -- slots
    def slot_sum(self, lo: int, hi: int, weights=None) -> dict[str, float]:
        tot = [0.0] * len(self.slot_names)
        for i in range(lo, hi + 1):
            w = 1 if weights is None else weights[i]
            if w:
                for k, v in enumerate(self.slots[i]):
                    tot[k] += v * w
        return dict(zip(self.slot_names, tot, strict=False))
