"""Fidelity beside an evaluation: figures of ``lamina fidelity``, and divergence by position and by layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lamina.app.evaluation_reader import FidelityFound
from lamina.app.report.columns import Columns, Series, lay_out_columns
from lamina.app.report.evaluation_tables import Table, fidelity_table
from lamina.app.report.labels import Box
from lamina.app.report.scales import LinearScale, LogScale, Tick, decade_ticks, decades, is_drawable, linear_ticks
from lamina.eval.summary import shown_name

WIDTH, HEIGHT = 440.0, 260.0
PLOT = Box(72, 12, 428, 216)
COLORS = 8
DASHES = ("", "dashed", "dotted")


@dataclass(frozen=True)
class Curve:
    """One arm's divergence by position, as a path; where arms share a colour, ``dash`` tells them apart."""

    name: str
    color: int
    dash: str
    d: str


@dataclass(frozen=True)
class Positions:
    """The picture of divergence by position."""

    curves: list[Curve]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    width: float = WIDTH
    height: float = HEIGHT
    plot: Box = PLOT


@dataclass(frozen=True)
class FidelityPart:
    """One document: its table, and the pictures that it has figures for."""

    id: str
    caption: str
    table: Table
    positions: Positions | None
    layers: list[Columns]


def fidelity_parts(found: Sequence[FidelityFound]) -> list[FidelityPart]:
    """A part a document."""
    parts = []
    for i, document in enumerate(found, 1):
        series = [Series(_name(a), _layers(a)) for a in document.arms if _layers(a)]
        caption = f"{document.name}: {document.model} on {document.text}, {document.tokens:,} tokens"
        parts.append(
            FidelityPart(
                f"f{i}",
                caption,
                fidelity_table(document.arms),
                lay_out_positions([(_name(a), _positions(a)) for a in document.arms if _positions(a)]),
                lay_out_columns(series),
            )
        )
    return parts


def lay_out_positions(arms: Sequence[tuple[str, list[tuple[float, float]]]]) -> Positions | None:
    """A line an arm through (position, mean KL); None without any."""
    if not arms:
        return None
    ends = max(x for _, values in arms for x, _ in values)
    x_scale = LinearScale(max(ends, 1.0), PLOT.left, PLOT.right)
    low, high = decades(y for _, values in arms for _, y in values)
    y_scale = LogScale(10.0**low, 10.0**high, PLOT.bottom, PLOT.top)
    curves = []
    for i, (name, values) in enumerate(arms):
        d, pen = "", "M"
        for x, y in values:
            if not math.isfinite(y):
                pen = "M"
                continue
            d += f"{pen}{x_scale(x):.1f} {y_scale(y) if is_drawable(y) else PLOT.bottom:.1f}"
            pen = "L"
        curves.append(Curve(name, i % COLORS, DASHES[i // COLORS % len(DASHES)], d))
    return Positions(curves, linear_ticks(x_scale, lambda value: f"{value:,.0f}"), decade_ticks(y_scale))


def _name(arm: dict[str, Any]) -> str:
    return shown_name(arm["name"], bool(arm.get("simulated")))


def _positions(arm: dict[str, Any]) -> list[tuple[float, float]]:
    """Pairs of position and KL; NaN where there is none."""
    given = arm.get("kl_by_position")
    pairs = given if isinstance(given, list) else []
    return [(float(p[0]), _number(p[1])) for p in pairs if isinstance(p, list) and len(p) == 2 and p[0] is not None]


def _layers(arm: dict[str, Any]) -> list[float]:
    given = arm.get("kl_by_layer")
    return [_number(x) for x in given] if isinstance(given, list) else []


def _number(x: Any) -> float:
    return float(x) if isinstance(x, int | float) else math.nan
