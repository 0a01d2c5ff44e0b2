"""Rows of cells coloured by bits; equal neighbours are drawn as one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lamina.app.report.labels import LINE_HEIGHT, Box
from lamina.app.report.scales import Tick

WIDTH = 440.0
LEFT, RIGHT, TOP = 62.0, 428.0, 12.0
UNDER = 44.0
PITCH = 14.0

Cell = tuple[int, int]
"""Place of a cell in its row, and its bits; 0 bits are left empty."""


@dataclass(frozen=True)
class Strip:
    """A row: its middle, and a path for every number of bits in units of cells; ``shown`` says if its label fits."""

    label: str
    y: float
    shown: bool
    paths: list[tuple[int, str]]


@dataclass(frozen=True)
class Strips:
    """The picture; ``exact`` are stretches (x, width) that a frame goes around, ``unit`` is the width of a cell."""

    rows: list[Strip]
    exact: list[tuple[float, float]]
    unit: float
    row_height: float
    x_ticks: list[Tick]
    plot: Box
    height: float
    width: float = WIDTH


def lay_out_strips(
    rows: Sequence[tuple[str, Iterable[Cell]]],
    count: float,
    ticks: Iterable[tuple[float, str]],
    *,
    pitch: float = PITCH,
    exact: Iterable[tuple[float, float]] = (),
) -> Strips:
    """Place labelled rows of ``count`` cells; ``ticks`` and ``exact`` (start, end) are in units of cells."""
    plot = Box(LEFT, TOP, RIGHT, TOP + pitch * len(rows))
    unit = (RIGHT - LEFT) / count
    every = next((n for n in (1, 2, 5, 10, 20) if n * pitch >= LINE_HEIGHT - 1), 50)
    return Strips(
        rows=[
            Strip(label, TOP + pitch * (i + 0.5), i % every == 0, _paths(cells))
            for i, (label, cells) in enumerate(rows)
        ],
        exact=[(LEFT + unit * start, unit * (end - start)) for start, end in exact if end > start],
        unit=unit,
        row_height=pitch - (2.0 if pitch >= 8 else 0.5),
        x_ticks=[Tick(LEFT + unit * at, text) for at, text in ticks],
        plot=plot,
        height=plot.bottom + UNDER,
    )


def runs(cells: Iterable[Cell]) -> Iterator[tuple[int, int, int]]:
    """Equal neighbours together: first place, how many, bits."""
    first = length = bits = 0
    for at, value in cells:
        if length and at == first + length and value == bits:
            length += 1
            continue
        if length and bits:
            yield first, length, bits
        first, length, bits = at, 1, value
    if length and bits:
        yield first, length, bits


def _paths(cells: Iterable[Cell]) -> list[tuple[int, str]]:
    """A path for every number of bits, fewest first."""
    found: dict[int, list[str]] = {}
    for first, length, bits in runs(cells):
        found.setdefault(bits, []).append(f"M{first} 0h{length}")
    return [(bits, "".join(found[bits])) for bits in sorted(found)]
