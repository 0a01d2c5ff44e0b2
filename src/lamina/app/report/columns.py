"""One figure a layer: columns on a logarithmic axis that several pictures share."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lamina.app.report.labels import Box
from lamina.app.report.scales import LogScale, Tick, decade_ticks, decades, is_drawable

WIDTH, HEIGHT = 440.0, 200.0
PLOT = Box(62, 12, 428, 156)
MOST_X_TICKS = 10


@dataclass(frozen=True)
class Series:
    """A name and one value a layer."""

    name: str
    values: Sequence[float]


@dataclass(frozen=True)
class Column:
    """One layer; without a value (``missing``) or with zero it has no height."""

    layer: int
    x: float
    y: float
    width: float
    height: float
    missing: bool


@dataclass(frozen=True)
class Columns:
    """The picture of one series."""

    name: str
    columns: list[Column]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    width: float = WIDTH
    height: float = HEIGHT
    plot: Box = PLOT


def lay_out_columns(series: Sequence[Series]) -> list[Columns]:
    """One picture a series, all on the same axis so that heights compare."""
    low, high = decades(value for one in series for value in one.values)
    scale = LogScale(10.0**low, 10.0**high, PLOT.bottom, PLOT.top)
    return [_one(one, scale) for one in series]


def _one(series: Series, scale: LogScale) -> Columns:
    n = max(len(series.values), 1)
    pitch = (PLOT.right - PLOT.left) / n
    every = next(step for step in (1, 2, 5, 10, 20, 50, n) if n / step <= MOST_X_TICKS)
    columns = []
    for i, value in enumerate(series.values):
        top = scale(value) if is_drawable(value) else PLOT.bottom
        x = PLOT.left + pitch * (i + 0.1)
        columns.append(Column(i, x, top, 0.8 * pitch, PLOT.bottom - top, not math.isfinite(value)))
    ticks = [Tick(PLOT.left + pitch * (i + 0.5), str(i)) for i in range(0, len(series.values), every)]
    return Columns(series.name, columns, ticks, decade_ticks(scale))
