"""What happened at firings: tiers by layer, and the signals that they were decided on."""

from collections.abc import Iterable
from statistics import median

from lamina.app.report.lines import PLOT, Lines, Path, Step, band, line, split
from lamina.app.report.scales import LogScale, Tick, decade_ticks, decades, is_drawable
from lamina.app.report.strips import LEFT, RIGHT, Strips, lay_out_strips
from lamina.app.trace_reader import Decision, Run, Spread, decisions
from lamina.control.config import Policy
from lamina.control.policies import vote

MOST_COLUMNS = 240
MOST_TICKS = 6


def columns(run: Run) -> list[range]:
    """Decisions by column: the tiers before the first firing, and every firing; several a column if there are many."""
    return split(1 + len(run.firings), MOST_COLUMNS)


def tier_strips(run: Run, side: int) -> Strips:
    """A row a layer; columns that hold several firings show the most frequent tier."""
    tiers = list(decisions(run))
    parts = columns(run)
    rows = [
        (str(layer), [(x, vote([tiers[i][row][side] for i in part])) for x, part in enumerate(parts)])
        for row, layer in enumerate(run.start.layers)
    ]
    ticks = [(x + 0.5, text) for x, text in _ticks(run, parts)]
    return lay_out_strips(rows, len(parts), ticks, pitch=max(3.0, min(14.0, 280 / len(rows))))


def uses_tau(run: Run) -> bool:
    """Whether the policy compares signals with the threshold."""
    return run.start.controller is not None and run.start.controller.get("policy") != Policy.ALLOCATE


def drift_lines(run: Run, side: int) -> Lines | None:
    """Median and range of one side's smoothed signals, and tau; None without any."""
    parts = columns(run)
    width = (RIGHT - LEFT) / len(parts)
    spreads: list[tuple[int, Spread]] = []
    taus: list[tuple[int, float]] = []
    for x, part in enumerate(parts):
        firings = [run.firings[i - 1] for i in part if i]
        found = _merge(firings, side)
        if found is not None:
            spreads.append((x, found))
        if uses_tau(run):
            taus += [(x, f.tau) for f in firings[-1:] if f.tau is not None and is_drawable(f.tau)]
    if not spreads:
        return None
    low, high = decades([*(v for _, s in spreads for v in (s.low, s.middle, s.high)), *(tau for _, tau in taus)])
    scale = LogScale(10.0**low, 10.0**high, PLOT.bottom, PLOT.top)

    def steps(values: Iterable[tuple[int, float]]) -> list[Step]:
        return [(LEFT + width * x, LEFT + width * (x + 1), scale(value)) for x, value in values]

    lows, middles, highs = (steps((x, getattr(s, name)) for x, s in spreads) for name in ("low", "middle", "high"))
    paths = [Path("range", "range", band(lows, highs)), Path("median", "line-1", line(middles))]
    if taus:
        paths.append(Path("tau", "line-2", line(steps(taus))))
    x_ticks = [Tick(LEFT + width * (x + 0.5), text) for x, text in _ticks(run, parts)]
    return Lines(paths, x_ticks, decade_ticks(scale))


def _merge(firings: list[Decision], side: int) -> Spread | None:
    found = [spread for firing in firings if (spread := firing.drift[side]) is not None]
    if not found:
        return None
    return Spread(min(s.low for s in found), median(s.middle for s in found), max(s.high for s in found))


def _ticks(run: Run, parts: list[range]) -> list[tuple[int, str]]:
    """Columns to name, by the decode step of their first firing."""
    every = -(-len(parts) // MOST_TICKS)
    named = [(x, parts[x][0]) for x in range(0, len(parts), every)]
    return [(x, f"{run.firings[i - 1].step:,}" if i else "start") for x, i in named]
