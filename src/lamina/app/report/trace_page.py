"""The page of a trace: one HTML file that needs nothing else."""

from collections.abc import Sequence
from typing import Any

from lamina.app.report.environment import format_figure, template
from lamina.app.report.trace_facts import facts, no_firing, notes
from lamina.app.report.trace_firings import MOST_COLUMNS, drift_lines, tier_strips, uses_tau
from lamina.app.report.trace_pages import chosen_layers, exact_stretches, layer_pages
from lamina.app.report.trace_use import bits_lines, bytes_lines, decided_bits
from lamina.app.trace_reader import Run
from lamina.app.trace_summary import SIDES, Summary, summarise
from lamina.app.values import format_bytes


def render_trace(run: Run, layers: Sequence[int] | None = None) -> str:
    """The page's HTML, which is well-formed XML as well; ``layers`` are those whose pages are shown."""
    summary = summarise(run)
    pages = [layer_pages(run, layer) for layer in layers or chosen_layers(run, summary)]
    stretches = " and ".join(f"positions {start:,} to {end - 1:,}" for start, end in exact_stretches(run))
    return template("trace.html.j2").render(
        run=run,
        notes=notes(run),
        facts=facts(run, summary),
        no_firing=no_firing(run),
        tiers=_tier_pictures(run, summary),
        merged=len(run.firings) >= MOST_COLUMNS,
        layer_rows=_layer_rows(run, summary),
        tau=uses_tau(run),
        drift=_drift_pictures(run),
        pages=pages,
        has_pages=any(run.pages.values()),
        several=run.rewritten,
        exact=stretches,
        bits={"picture": bits_lines(run), "desc": _bits_desc(run)},
        bytes={"picture": bytes_lines(run), "desc": _bytes_desc(run)} if run.memory else None,
    )


def _tier_pictures(run: Run, summary: Summary) -> list[dict[str, Any]]:
    if not run.firings:
        return []
    found = []
    for side, name in enumerate(SIDES):
        change = summary.changes[name]
        layers = sum(pair[side].up + pair[side].down > 0 for pair in summary.layer_changes)
        desc = (
            f"{len(run.start.layers)} layers, {len(run.firings)} firings: {change.up} changes to more bits and "
            f"{change.down} to fewer, in {layers} layers"
        )
        found.append({"side": name.upper(), "picture": tier_strips(run, side), "desc": desc})
    return found


def _drift_pictures(run: Run) -> list[dict[str, Any]]:
    found = []
    for side, name in enumerate(SIDES):
        picture = drift_lines(run, side)
        if picture is not None:
            known = [spread.middle for firing in run.firings if (spread := firing.drift[side]) is not None]
            desc = f"median over layers from {format_figure(known[0])} at first to {format_figure(known[-1])} at last"
            taus = [firing.tau for firing in run.firings if firing.tau is not None] if uses_tau(run) else []
            if taus:
                desc += f"; tau from {format_figure(taus[0])} to {format_figure(taus[-1])}"
            found.append({"side": name.upper(), "picture": picture, "desc": desc})
    return found


def _layer_rows(run: Run, summary: Summary) -> list[list[int]]:
    rows = zip(run.start.layers, run.start.tiers, summary.final_tiers, summary.layer_changes)
    return [
        [layer, *(x for side in (0, 1) for x in (first[side], last[side], changes[side].up, changes[side].down))]
        for layer, first, last, changes in rows
    ]


def _bits_desc(run: Run) -> str:
    decided = [bits for _, bits in decided_bits(run)]
    desc = f"decided: {format_figure(decided[0])} at first, {format_figure(decided[-1])} at last"
    for name, values in (
        ("packed tokens", [m.bits_history for m in run.memory if m.bits_history]),
        ("everything", [m.bits_at_context for m in run.memory if m.bits_at_context]),
    ):
        if values:
            desc += f"; {name}: {format_figure(values[0])} at first, {format_figure(values[-1])} at last"
    return desc


def _bytes_desc(run: Run) -> str:
    first, last = run.memory[0].n_bytes, run.memory[-1].n_bytes
    most = max(m.n_bytes for m in run.memory)
    return f"{format_bytes(first)} at first, {format_bytes(last)} at last, {format_bytes(most)} at most"
