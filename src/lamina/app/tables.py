"""Reports as tables and lines for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from lamina.app.calibrate import CalibrationReport
    from lamina.app.demo import DemoRow
    from lamina.app.doctor import Check
    from lamina.app.fidelity import FidelityReport
    from lamina.app.plan import Plan
    from lamina.app.tune import TuneReport

_BOX = box.SIMPLE_HEAD
ENGINE_ROWS = ("bf16", "fp8")
DEMO_COLUMNS = ("bits", "KV cache", "of bf16", "KL mean", "top-1", "tok/s")
_STATE_STYLES = {"ok": "green", "limited": "yellow", "missing": "yellow"}


def calibration_table(report: "CalibrationReport") -> Table:
    """What a calibration learnt, one fact a row."""
    size = _bytes(report.file_bytes)
    return facts_table(
        [
            ("profile", f"{report.profile} ({size})"),
            ("model", report.model),
            ("data", ", ".join(report.data)),
            ("tokens", f"{report.tokens:,}"),
            ("positions", report.positions),
            ("transform", report.transform),
            ("initial tier", report.tier),
            ("time", f"{report.seconds:.1f} s"),
        ]
    )


def tuning_table(report: "TuneReport") -> Table:
    """What tuning found, one fact a row."""
    c = report.controller
    rule = f"{c.policy}, {c.target_bits:g} bits" if c.policy == "allocate" else f"{c.policy}, tau {c.tau0:.3g} nats"
    bits = [b for pair in report.tiers for b in pair]
    spread = ", ".join(f"{bits.count(b)} at {b} bits" for b in sorted(set(bits)))
    return facts_table(
        [
            ("profile", report.profile),
            ("model", report.model),
            ("goal", report.goal),
            ("controller", rule),
            ("initial tiers", f"{sum(bits) / len(bits):.2f} bits on average: of {len(bits)} layer sides {spread}"),
            *((f"on {name}", f"KL {_kl(r.kl_mean)} at {r.tier_mean:.2f} bits") for name, r in report.texts),
            ("time", f"{report.seconds:.1f} s"),
        ]
    )


def facts_table(facts: Sequence[tuple[str, str]]) -> Table:
    """One fact a row: its name and its value."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, Text(value))
    return table


def fidelity_table(report: "FidelityReport") -> Table:
    """One row an arm; simulated arms are marked."""
    title = f"{report.model} on {report.text}: {report.tokens:,} tokens in sequences of {report.seq_len:,}, "
    share = report.position_offset / report.max_positions
    title += f"from position {report.position_offset:,} ({share:.0%} of the model's {report.max_positions:,})"
    table = figures_table(title, "arm", ("bits", "in all", "KL", "median", "99 %", "top-1", "ppl", "KV cache"))
    for arm in report.arms:
        table.add_row(
            arm.name + ("*" if arm.simulated else ""),
            _bits(arm.bits_history),
            _bits(arm.bits_at_context),
            *(_kl(x) for x in (arm.kl_mean, arm.kl_median, arm.kl_p99)),
            f"{arm.top1:.1%}",
            f"{arm.ppl:.2f}",
            _bytes(arm.kv_bytes),
        )
    table.caption = "bits of packed tokens, and in all with windows and tables; mean KL in nats"
    if any(arm.simulated for arm in report.arms):
        table.caption += "\n* simulated: rows are quantised and dequantised again, not stored"
    return table


def demo_table(title: str, rows: Sequence["DemoRow"]) -> Table:
    """The demo's comparison."""
    table = figures_table(title, "arm", DEMO_COLUMNS)
    for row in rows:
        table.add_row(*demo_cells(row), style="bold" if row.name.startswith("lamina") else "")
    return table


def demo_cells(row: "DemoRow") -> tuple[str, ...]:
    """An arm's name and figures, in the order of ``DEMO_COLUMNS``."""
    return (
        row.name,
        _bits(row.bits),
        _bytes(row.kv_bytes),
        f"{row.kv_bytes / row.kv_bytes_bf16:.0%}",
        _kl(row.kl_mean),
        f"{row.top1:.1%}",
        f"{row.tokens_per_second:.1f}",
    )


def plan_table(plan: "Plan") -> Table:
    """One row a way of keeping the cache."""
    title = (
        f"{plan.model} in {_bytes(plan.memory_bytes)}: weights {_bytes(plan.weight_bytes)} ({plan.dtype}), reserve "
        f"{_bytes(plan.reserve_bytes)}, KV cache {_bytes(plan.cache_bytes)}"
    )
    each = "longest request" if plan.max_batch == 1 else f"longest of {plan.max_batch} requests"
    context = f"{plan.context:,} tokens"
    table = figures_table(
        title, "KV cache", ("bytes/token", f"one request of {context}", each, f"requests of {context}")
    )
    for row in plan.rows:
        table.add_row(
            row.name if row.name in ENGINE_ROWS else f"Lamina {row.name}",
            f"{row.bytes_per_token:,.0f}",
            _bytes(row.request_bytes),
            f"{row.max_tokens:,}",
            f"{row.requests:,}",
            style="" if row.name in ENGINE_ROWS else "bold",
        )
    return table


def doctor_table(checks: Sequence["Check"]) -> Table:
    """One row a check: state, what was found, and what to do about it."""
    table = Table(box=_BOX, pad_edge=False)
    for name in ("", "state", "found", "what to do"):
        table.add_column(name, overflow="fold")
    for check in checks:
        style = "red" if check.core and check.state == "missing" else _STATE_STYLES[check.state]
        state = Text(check.state, style=style)
        table.add_row(Text(check.name, style="bold"), state, Text(check.found), Text(check.fix))
    return table


def figures_table(title: str, first: str, others: Sequence[str]) -> Table:
    """An empty table of figures; ``first`` heads the column of names."""
    table = Table(
        title=Text(title) if title else None,
        title_justify="left",
        caption_justify="left",
        box=_BOX,
        padding=(0, 1, 0, 0),
    )
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=len(name) <= 10)
    return table


def _bits(value: float) -> str:
    return f"{value:.2f}" if value == value else "-"


def _kl(value: float) -> str:
    if value != value:
        return "-"
    if 0 < value < 1e-4:
        return f"{value:.0e}"
    return f"{value:.4f}" if value < 10 else f"{value:.3f}"


def _bytes(value: float) -> str:
    from lamina.app.values import format_bytes

    return format_bytes(value)
