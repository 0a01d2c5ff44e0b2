"""The page of an evaluation: one HTML file that needs nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from lamina.app.evaluation_reader import Found, RunFound
from lamina.app.report.accuracy import Accuracy, lay_out_accuracy
from lamina.app.report.environment import format_figure, template
from lamina.app.report.evaluation_facts import circumstances, commands, notes, settings_table, title
from lamina.app.report.evaluation_fidelity import FidelityPart, fidelity_parts
from lamina.app.report.evaluation_orders import orders_parts, orders_table
from lamina.app.report.evaluation_tables import Table, bytes_table, bytes_total, score_table, seed_table
from lamina.app.report.evaluation_tiers import TierPart, tier_part
from lamina.app.report.stacks import Stacks, lay_out_stacks
from lamina.eval.held import Holding, TierVector
from lamina.eval.summary import BASELINE, Score, shown_name

UNKNOWN_KINDS = "kinds not recorded"


@dataclass(frozen=True)
class BytesPart:
    """Bytes of all arms on one workload; ``totals`` says them in words."""

    picture: Stacks
    table: Table
    totals: list[str]
    desc: str
    unknown: list[str]
    has_reference: bool


@dataclass(frozen=True)
class Workload:
    """All about one task of one run."""

    id: str
    name: str
    scores: list[Score]
    accuracy: Accuracy
    desc: str
    table: Table
    seeds: Table
    tiers: list[TierPart]
    orders: Table | None
    order_tiers: list[TierPart]
    bytes: BytesPart | None


def workloads(found: Found) -> list[Workload]:
    """In the order of runs and their tasks."""
    several = len(found.runs) > 1
    parts = [(run, task) for run in found.runs for task in dict.fromkeys(s.task for s in run.scores)]
    return [_workload(f"w{i}", run, task, several) for i, (run, task) in enumerate(parts, 1)]


def render_evaluation(found: Found) -> str:
    """The page's HTML, which is well-formed XML as well."""
    fidelity: list[FidelityPart] = fidelity_parts(found.fidelity)
    return template("evaluation.html.j2").render(
        title=title(found),
        workloads=workloads(found),
        notes=notes(found),
        settings=settings_table(found),
        fidelity=fidelity,
        circumstances=circumstances(found),
        commands=commands(found),
        simulated=any(s.simulated for run in found.runs for s in run.scores),
    )


def _workload(id: str, run: RunFound, task: str, several: bool) -> Workload:
    scores = [s for s in run.scores if s.task == task]
    orders = [s for s in run.orders if s.task == task]
    return Workload(
        id,
        f"{task}, {run.name or 'this folder'}" if several else task,
        scores,
        lay_out_accuracy(scores),
        "; ".join(f"{shown_name(s.arm, s.simulated)}: {_place(s)}" for s in scores),
        score_table(scores),
        seed_table(scores),
        [
            _tiers(list(vectors), run.packed)
            for _, vectors in groupby((t for t in run.tiers if t.task == task), key=lambda t: t.arm)
        ],
        orders_table(orders) if orders else None,
        orders_parts(orders, run.packed),
        _bytes([h for h in run.holdings if h.task == task]),
    )


def _place(s: Score) -> str:
    bits = "nothing packed" if s.bits is None else f"{format_figure(s.bits)} bits"
    return f"{bits}, {s.accuracy.mean:.1%} right, {s.accuracy.low:.1%} to {s.accuracy.high:.1%}"


def _tiers(vectors: Sequence[TierVector], packed: Sequence[int] | None) -> TierPart:
    """A row of layers for K and one for V of every vector."""
    rows = [
        (f"{_label(v)} {name}", [pair[side] for pair in v.tiers]) for v in vectors for side, name in enumerate("KV")
    ]
    means = [
        f"{_label(v)}: {sum(map(sum, v.tiers)) / (2 * len(v.tiers)):.2f} bits on average" for v in vectors if v.tiers
    ]
    name = shown_name(vectors[0].arm, vectors[0].simulated)
    return tier_part(name, rows, packed, "; ".join(means))


def _label(v: TierVector) -> str:
    return v.when if v.seed is None else f"seed {v.seed}"


def _bytes(found: Sequence[Holding]) -> BytesPart | None:
    if not found:
        return None
    names = [shown_name(h.arm, h.simulated) for h in found]
    kinds = [h.by_kind if h.by_kind is not None else {UNKNOWN_KINDS: h.n_bytes} for h in found]
    stacked = [(name, {kind: round(n) for kind, n in by_kind.items()}) for name, by_kind in zip(names, kinds)]
    references = [h.bf16 for h in sorted(found, key=lambda h: h.arm != BASELINE) if h.bf16 is not None]
    picture = lay_out_stacks(stacked, round(references[0]) if references else 0)
    unknown = [name for name, h in zip(names, found) if h.by_kind is None]
    totals = [bytes_total(h) for h in found]
    desc = "; ".join(f"{name}: {total}" for name, total in zip(names, totals))
    return BytesPart(picture, bytes_table(found), totals, desc, unknown, bool(references))
