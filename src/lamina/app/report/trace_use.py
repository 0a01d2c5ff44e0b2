"""Bits and bytes over the time of a run."""

from collections.abc import Callable, Sequence

from lamina.app.report.lines import PLOT, Lines, Path, Step, line, thin
from lamina.app.report.scales import LinearScale, LogScale, Tick, linear_ticks
from lamina.app.trace_reader import Run, average_bits
from lamina.app.values import format_bytes

MOST_POINTS = 480
BITS = (1, 2, 4, 8, 16, 32, 64)

Moment = tuple[float, float]
"""Seconds, and what began to hold then."""


def decided_bits(run: Run) -> list[Moment]:
    """Average bits as decided, from the start on."""
    sizes = run.start.sizes
    return [(0.0, average_bits(run.start.tiers, sizes))] + [
        (firing.seconds, average_bits(firing.tiers, sizes)) for firing in run.firings
    ]


def bits_lines(run: Run) -> Lines:
    """Bits as decided, of the packed tokens, and of everything."""
    series = [
        ("decided", decided_bits(run)),
        ("history", [(m.seconds, m.bits_history) for m in run.memory if m.bits_history]),
        ("context", [(m.seconds, m.bits_at_context) for m in run.memory if m.bits_at_context]),
    ]
    values = [bits for _, moments in series for _, bits in moments]
    low = max(b for b in BITS if b <= max(1, min(values)))
    high = next((b for b in BITS if b > max(values)), max(values))
    scale = LogScale(low, high, PLOT.bottom, PLOT.top)
    ticks = [Tick(scale(b), str(b)) for b in BITS if low <= b <= high]
    return _lines(run, series, scale, ticks)


def bytes_lines(run: Run) -> Lines | None:
    """Allocated bytes, those of a bfloat16 cache, and the limit; None if they were never told."""
    if not run.memory:
        return None
    series = [
        ("cache", [(m.seconds, float(m.n_bytes)) for m in run.memory]),
        ("bf16", [(m.seconds, m.bf16_bytes) for m in run.memory if m.bf16_bytes]),
    ]
    if run.start.max_bytes is not None:
        series.append(("limit", [(0.0, float(run.start.max_bytes))]))
    most = max(1.0, *(n_bytes for _, moments in series for _, n_bytes in moments))
    scale = LinearScale(1.04 * most, PLOT.bottom, PLOT.top)
    return _lines(run, series, scale, linear_ticks(scale, format_bytes, binary=True))


def _lines(
    run: Run, series: Sequence[tuple[str, Sequence[Moment]]], scale: Callable[[float], float], y_ticks: list[Tick]
) -> Lines:
    time = LinearScale(run.seconds or 1.0, PLOT.left, PLOT.right)
    paths = [Path(name, f"line-{i}", line(_steps(moments, time, scale))) for i, (name, moments) in enumerate(series, 1)]
    return Lines(paths, linear_ticks(time, lambda seconds: f"{seconds:g}"), y_ticks)


def _steps(moments: Sequence[Moment], time: LinearScale, scale: Callable[[float], float]) -> list[Step]:
    kept = [moments[i] for i in thin([value for _, value in moments], MOST_POINTS)]
    ends = [*(seconds for seconds, _ in kept[1:]), time.high]
    return [(time(seconds), time(end), scale(value)) for (seconds, value), end in zip(kept, ends)]
