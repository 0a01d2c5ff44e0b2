"""Tables of an evaluation, the same for the page and for Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lamina.app.report.environment import format_figure
from lamina.app.values import format_bytes
from lamina.eval.held import Holding
from lamina.eval.statistics import Comparison, Interval
from lamina.eval.summary import BASELINE, Score, shown_name

NONE = "–"


@dataclass(frozen=True)
class Table:
    """Heads, and rows of cells; the first cell of a row is its name."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [self.header, ("---",) + ("--:",) * (len(self.header) - 1), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def score_table(scores: Sequence[Score]) -> Table:
    """Accuracy of each arm of one workload, and what the comparison with the exact cache says."""
    header = (
        *("arm", "bits", "in all", "n", "right", "95 %", "verdict", "detectable, points"),
        *(f"less {BASELINE}, points", "95 %", "gained, lost", "p", "Holm p"),
    )
    base = next((s for s in scores if s.arm == BASELINE), None)
    return Table(header, [_score_row(s, base) for s in scores])


def _score_row(s: Score, base: Score | None) -> tuple[str, ...]:
    band = f"{100 * s.accuracy.low:.1f} to {s.accuracy.high:.1%}"
    right = (f"{s.n:,}", f"{s.accuracy.mean:.1%}", band)
    return (shown_name(s.arm, s.simulated), _bits(s.bits), _bits(s.bits_at_context), *right, *_against(s, base))


def _against(s: Score, base: Score | None) -> tuple[str, ...]:
    c = s.against
    if c is None:
        return (not_compared(s, base), *[NONE] * 6)
    return (
        verdict(c),
        "none" if c.detectable is None else f"{100 * c.detectable:.1f}",
        f"{100 * c.difference.mean:+.1f}",
        f"{100 * c.difference.low:+.1f} to {100 * c.difference.high:+.1f}",
        f"{c.gained:,}, {c.lost:,}",
        _p(c.p),
        _p(c.p_holm),
    )


def verdict(c: Comparison) -> str:
    """Better, worse or undecided, by Holm's correction."""
    return c.verdict().split()[0].rstrip(":")


def not_compared(s: Score, base: Score | None) -> str:
    """Why an arm has no comparison."""
    if s.arm == BASELINE:
        return NONE
    if base is None:
        return f"{BASELINE} was not run"
    return f"not yet: other prompts than {BASELINE}"


def seed_table(scores: Sequence[Score]) -> Table:
    """Share of right answers by seed, in order of their numbers, and intervals of bits over prompts."""
    most = max(len(s.by_seed) for s in scores)
    header = ("arm", *(f"seed {i + 1} of {most}" for i in range(most)), "bits, 95 %", "in all, 95 %")
    rows = [
        (
            shown_name(s.arm, s.simulated),
            *(f"{x:.1%}" for x in s.by_seed),
            *([NONE] * (most - len(s.by_seed))),
            _band(s.bits_interval),
            _band(s.context_interval),
        )
        for s in scores
    ]
    return Table(header, rows)


def bytes_table(found: Sequence[Holding]) -> Table:
    """Bytes by kind, on average over prompts."""
    kinds = list(dict.fromkeys(kind for h in found for kind, n in (h.by_kind or {}).items() if n))
    rows = [
        (
            shown_name(h.arm, h.simulated),
            *(f"{h.by_kind.get(kind, 0):,.0f}" if h.by_kind is not None else NONE for kind in kinds),
            f"{h.n_bytes:,.0f}",
            f"{h.n_bytes / h.bf16:.1%}" if h.bf16 else NONE,
        )
        for h in found
    ]
    return Table(("arm", *(kind.replace("_", " ") for kind in kinds), "in all", f"of {BASELINE}"), rows)


def bytes_total(h: Holding) -> str:
    """Bytes in words."""
    return format_bytes(h.n_bytes) + (f", {h.n_bytes / h.bf16:.0%} of bf16" if h.bf16 else "")


def fidelity_table(arms: Sequence[dict[str, Any]]) -> Table:
    """Figures of ``lamina fidelity``; what a document does not tell is left open."""
    header = ("arm", "bits", "in all", "mean KL", "median", "99 %", "same top token", "perplexity")
    rows = []
    for arm in arms:
        figures = [_figure(arm.get(name)) for name in ("kl_mean", "kl_median", "kl_p99")]
        top1 = arm.get("top1")
        rows.append(
            (
                shown_name(arm["name"], bool(arm.get("simulated"))),
                *(_bits(arm.get(name)) for name in ("bits_history", "bits_at_context")),
                *figures,
                f"{top1:.1%}" if top1 is not None else NONE,
                _figure(arm.get("ppl")),
            )
        )
    return Table(header, rows)


def _band(x: Interval | None) -> str:
    return NONE if x is None else f"{x.low:.2f} to {x.high:.2f}"


def _bits(x: float | None) -> str:
    return NONE if x is None else f"{x:.2f}"


def _p(x: float) -> str:
    return "<0.0001" if x < 1e-4 else format_figure(x)


def _figure(x: float | None) -> str:
    return NONE if x is None else format_figure(x)
