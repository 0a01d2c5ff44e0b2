"""What a trace says in words."""

from lamina.app.report.environment import format_figure
from lamina.app.trace_reader import Run
from lamina.app.trace_summary import SIDES, Summary
from lamina.app.values import format_bytes, tier_name


def facts(run: Run, summary: Summary) -> list[tuple[str, str]]:
    """The table of facts."""
    start, shed = run.start, summary.planes_shed
    found = [
        ("model", start.model),
        ("Lamina", start.lamina),
        ("packed layers", f"{len(start.layers)}: {_ranges(start.layers)}"),
        ("windows", ", ".join(f"{name} {tokens}" for name, tokens in start.window.items()) + " tokens"),
        ("controller", _controller(run)),
        ("bytes allowed", "no limit" if start.max_bytes is None else _bytes(start.max_bytes)),
        ("time", f"{run.seconds:,.1f} s"),
        ("tokens", f"{run.context:,}"),
        ("firings", f"{summary.firings:,}"),
    ]
    for side in SIDES:
        change = summary.changes[side]
        found.append((f"tier changes of {side.upper()}", f"{change.up:,} up, {change.down:,} down"))
    found += [
        ("pages closed", f"{summary.pages_closed:,}"),
        ("planes shed", f"{sum(shed.values()):,}: {shed['k']:,} of K, {shed['v']:,} of V"),
        *([("exact rows shed", f"of {summary.exact_shed:,} pages")] if summary.exact_shed else []),
        ("bits decided", f"{format_figure(summary.decided_bits)} on average at the end"),
    ]
    if summary.bits_history is not None:
        found.append(("bits of packed tokens", format_figure(summary.bits_history)))
    if summary.bits_at_context is not None:
        found.append(("bits of everything", format_figure(summary.bits_at_context)))
    if summary.final_bytes is not None:
        share = f", {summary.final_bytes / summary.bf16_bytes:.0%} of bf16" if summary.bf16_bytes else ""
        found.append(("final bytes", _bytes(summary.final_bytes) + share))
    return found


def notes(run: Run) -> list[str]:
    """What is unusual about the trace itself."""
    if run.cut_line is not None:
        return [f"The run was cut short: line {run.cut_line}, the last one, is not whole and was left out."]
    return [] if run.ended else ["The run was cut short, or goes on: the trace has no end event."]


def no_firing(run: Run) -> str:
    """Why there are no decisions to show; empty if there are some."""
    if run.firings:
        return ""
    names = sorted({tier_name(pair) for pair in run.start.tiers})
    held = f"{names[0]} bits in every layer" if len(names) == 1 else f"{', '.join(names)} bits, by layer"
    if run.start.controller is None:
        return f"There was no controller: the run began with fixed tiers, {held}."
    return f"The controller never fired: the tiers stayed as the run began, {held}."


def _controller(run: Run) -> str:
    settings = run.start.controller
    if settings is None:
        return "none, fixed tiers"
    return ", ".join(f"{name} {_value(value)}" for name, value in settings.items())


def _value(value: object) -> str:
    if isinstance(value, list):
        return "/".join(map(str, value))
    return format_figure(value) if isinstance(value, float) else str(value)


def _bytes(n_bytes: int) -> str:
    return f"{n_bytes:,} ({format_bytes(n_bytes)})"


def _ranges(numbers: list[int]) -> str:
    """``0-3, 7`` for 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
