"""Bits against divergence, one point an arm."""

from collections.abc import Sequence
from dataclasses import dataclass

from lamina.app.report.labels import Box, Label, place_labels
from lamina.app.report.scales import LogScale, Tick, decade_ticks, decades, is_drawable

WIDTH, HEIGHT = 440.0, 330.0
PLOT = Box(62, 14, 428, 276)
BITS = (2, 4, 8, 16)


@dataclass(frozen=True)
class Point:
    """An arm's place; ``at_edge`` marks a divergence of zero, which has no place on a logarithmic axis."""

    name: str
    x: float
    y: float
    at_edge: bool
    label: Label


@dataclass(frozen=True)
class Scatter:
    """The picture; ``missing`` names the arms without a place in it."""

    x_ticks: list[Tick]
    y_ticks: list[Tick]
    points: list[Point]
    missing: list[str]
    width: float = WIDTH
    height: float = HEIGHT
    plot: Box = PLOT


def lay_out_scatter(arms: Sequence[tuple[str, float, float]]) -> Scatter:
    """Place arms (name, bits, divergence); both axes are logarithmic."""
    placed = [arm for arm in arms if is_drawable(arm[1]) and (is_drawable(arm[2]) or arm[2] == 0)]
    bits = [*BITS, *(arm[1] for arm in placed)]
    x_scale = LogScale(min(bits) / 1.12, max(bits) * 1.12, PLOT.left, PLOT.right)
    low, high = decades(arm[2] for arm in placed)
    y_scale = LogScale(10.0**low, 10.0**high, PLOT.bottom, PLOT.top)
    spots = [(name, x_scale(x), y_scale(y)) for name, x, y in placed]
    return Scatter(
        x_ticks=[Tick(x_scale(b), str(b)) for b in BITS],
        y_ticks=decade_ticks(y_scale),
        points=[
            Point(name, x, y, arm[2] == 0, label)
            for arm, (name, x, y), label in zip(placed, spots, place_labels(spots, PLOT))
        ],
        missing=[arm[0] for arm in arms if arm not in placed],
    )
