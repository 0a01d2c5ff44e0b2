"""Figures that hold from one place to the next: lines of steps, and bands between two of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lamina.app.report.labels import Box
from lamina.app.report.scales import Tick

WIDTH, HEIGHT = 440.0, 220.0
PLOT = Box(62, 12, 428, 176)

Step = tuple[float, float, float]
"""Start, end and height of a step, in a picture."""


@dataclass(frozen=True)
class Path:
    """A line or a band, and the class that draws it."""

    name: str
    kind: str
    d: str


@dataclass(frozen=True)
class Lines:
    """The picture."""

    paths: list[Path]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    width: float = WIDTH
    height: float = HEIGHT
    plot: Box = PLOT


def line(steps: Iterable[Step]) -> str:
    """One line through all steps that touch."""
    d, end = "", None
    for x0, x1, y in steps:
        d += f"V{y:.1f}H{x1:.1f}" if end == x0 else f"M{x0:.1f} {y:.1f}H{x1:.1f}"
        end = x1
    return d


def band(low: Sequence[Step], high: Sequence[Step]) -> str:
    """The area between steps at the same places."""
    return "".join(
        f"M{x0:.1f} {bottom:.1f}V{top:.1f}H{x1:.1f}V{bottom:.1f}z" for (x0, x1, bottom), (_, _, top) in zip(low, high)
    )


def thin(values: Sequence[float], most: int) -> list[int]:
    """Places of at most ``most`` values that draw like all of them: of each stretch the first, last, least, largest."""
    if len(values) <= most:
        return list(range(len(values)))
    kept: set[int] = set()
    for part in split(len(values), most // 4):
        kept |= {part[0], part[-1], min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    return sorted(kept)


def split(n: int, most: int) -> list[range]:
    """``n`` things in order, in at most ``most`` parts of about equal size."""
    parts = min(n, most)
    return [range(n * i // parts, n * (i + 1) // parts) for i in range(parts)]
