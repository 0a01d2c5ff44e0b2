"""Bytes to scale: one bar an arm, stacked by kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH = 440.0
LEFT, RIGHT = 6.0, 434.0
BAR_HEIGHT = 16.0
PITCH = 46.0
TOP = 6.0


@dataclass(frozen=True)
class Segment:
    """One kind of bytes in a bar; ``color`` counts the kinds in the order in which they appear."""

    kind: str
    n_bytes: int
    color: int
    x: float
    width: float


@dataclass(frozen=True)
class Bar:
    """One arm's bytes."""

    name: str
    n_bytes: int
    y: float
    segments: list[Segment]


@dataclass(frozen=True)
class Stacks:
    """The picture; ``reference`` is the place of as many bytes as the arms are compared with."""

    bars: list[Bar]
    kinds: list[str]
    reference: float
    height: float
    width: float = WIDTH
    left: float = LEFT
    bar_height: float = BAR_HEIGHT


def lay_out_stacks(arms: Sequence[tuple[str, Mapping[str, int]]], reference: int) -> Stacks:
    """Place arms (name, bytes by kind) on one scale, on which the largest bar or ``reference`` fills the width."""
    kinds = list(dict.fromkeys(kind for _, by_kind in arms for kind, n_bytes in by_kind.items() if n_bytes))
    most = max([reference, 1, *(sum(by_kind.values()) for _, by_kind in arms)])
    per_byte = (RIGHT - LEFT) / most
    bars = []
    for i, (name, by_kind) in enumerate(arms):
        segments, x = [], LEFT
        for kind in (k for k in kinds if by_kind.get(k)):
            segments.append(Segment(kind, by_kind[kind], kinds.index(kind), x, by_kind[kind] * per_byte))
            x += by_kind[kind] * per_byte
        bars.append(Bar(name, sum(by_kind.values()), TOP + PITCH * i + PITCH - BAR_HEIGHT - 10, segments))
    return Stacks(bars, kinds, LEFT + reference * per_byte, TOP + PITCH * len(arms))
