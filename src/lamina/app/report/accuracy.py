"""Accuracy against bits, one point an arm, with its intervals both ways."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lamina.app.report.labels import Box, Label, place_labels
from lamina.app.report.scales import LogScale, Tick, is_drawable
from lamina.app.report.scatter import BITS
from lamina.eval.summary import Score, shown_name

WIDTH, HEIGHT = 440.0, 360.0
PLOT = Box(62, 14, 428, 306)
STEPS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
MOST_STEPS = 7
CAP = 3.0
MOST_NAMES = 8


@dataclass(frozen=True)
class Point:
    """An arm's place, and where its intervals end."""

    arm: str
    simulated: bool
    x: float
    y: float
    left: float
    right: float
    top: float
    bottom: float
    label: Label

    @property
    def bars(self) -> str:
        """Both intervals as a path, with caps."""
        across = f"M{self.left:.2f} {self.y:.2f}H{self.right:.2f}"
        ends = "".join(f"M{x:.2f} {self.y - CAP:.2f}v{2 * CAP:g}" for x in (self.left, self.right))
        tips = "".join(f"M{self.x - CAP:.2f} {y:.2f}h{2 * CAP:g}" for y in (self.top, self.bottom))
        return f"{across}M{self.x:.2f} {self.bottom:.2f}V{self.top:.2f}{ends}{tips}"


@dataclass(frozen=True)
class Accuracy:
    """The picture; ``missing`` names arms without a place in it, ``key`` those that numbers stand for if many."""

    x_ticks: list[Tick]
    y_ticks: list[Tick]
    points: list[Point]
    missing: list[str]
    key: list[str]
    width: float = WIDTH
    height: float = HEIGHT
    plot: Box = PLOT


def lay_out_accuracy(scores: Sequence[Score]) -> Accuracy:
    """Place the arms of one workload; bits are on a logarithmic axis, shares on one that their intervals fill."""
    placed = [(s, s.bits) for s in scores if s.bits is not None and is_drawable(s.bits)]
    missing = [shown_name(s.arm, s.simulated) for s in scores if s.arm not in {p.arm for p, _ in placed}]
    bits = [*BITS, *(x for s, b in placed for x in _ends(s, b))]
    x_scale = LogScale(min(bits) / 1.12, max(bits) * 1.12, PLOT.left, PLOT.right)
    low, high, step = share_axis([x for s, _ in placed for x in (s.accuracy.low, s.accuracy.high)])

    def y_scale(share: float) -> float:
        return PLOT.bottom - (share - low) / (high - low) * (PLOT.bottom - PLOT.top)

    names = [shown_name(s.arm, s.simulated) for s, _ in placed]
    many = len(names) > MOST_NAMES
    texts = [str(i) for i in range(1, len(names) + 1)] if many else names
    spots = [(text, x_scale(b), y_scale(s.accuracy.mean)) for text, (s, b) in zip(texts, placed)]
    tips = [(y_scale(s.accuracy.high), y_scale(s.accuracy.low)) for s, _ in placed]
    bars = [Box(x - CAP, top, x + CAP, bottom) for (_, x, _), (top, bottom) in zip(spots, tips)]
    points = []
    for (s, b), (_, x, y), (top, bottom), label in zip(placed, spots, tips, place_labels(spots, PLOT, bars)):
        left, right = map(x_scale, _ends(s, b))
        points.append(Point(s.arm, s.simulated, x, y, left, right, top, bottom, label))
    return Accuracy(
        x_ticks=[Tick(x_scale(b), str(b)) for b in BITS],
        y_ticks=[
            Tick(y_scale(low + step * i), _percent(low + step * i)) for i in range(round((high - low) / step) + 1)
        ],
        points=points,
        missing=missing,
        key=names if many else [],
    )


def share_axis(shares: Sequence[float]) -> tuple[float, float, float]:
    """Ends of an axis that holds these shares, and the step of its ticks; all of it without any."""
    low, high = (min(shares), max(shares)) if shares else (0.0, 1.0)
    step = next((s for s in STEPS if (high - low) / s <= MOST_STEPS - 1), STEPS[-1])
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return first * step, max(last, first + 1) * step, step


def _ends(score: Score, bits: float) -> tuple[float, float]:
    found = score.bits_interval
    return (found.low, found.high) if found is not None else (bits, bits)


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
