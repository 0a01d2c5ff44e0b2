"""Tiers of one arm as rows of layers."""

from collections.abc import Sequence
from dataclasses import dataclass

from lamina.app.report.strips import PITCH, Strips, lay_out_strips

MOST_LAYER_TICKS = 10


@dataclass(frozen=True)
class TierPart:
    """Tiers that one arm's controllers came to."""

    arm: str
    picture: Strips
    bits: list[int]
    desc: str


def tier_part(
    arm: str, rows: Sequence[tuple[str, Sequence[int]]], packed: Sequence[int] | None, desc: str, pitch: float = PITCH
) -> TierPart:
    """A picture of rows, each a label and the bits of every packed layer; ``packed`` are their numbers if known."""
    n = max(len(bits) for _, bits in rows)
    layers = packed if packed is not None and len(packed) == n else range(n)
    every = next(step for step in (1, 2, 5, 10, 20, 50, n) if n / step <= MOST_LAYER_TICKS)
    ticks = [(i + 0.5, str(layers[i])) for i in range(0, n, every)]
    cells = [(label, list(enumerate(bits))) for label, bits in rows]
    picture = lay_out_strips(cells, max(n, 1), ticks, pitch=pitch)
    return TierPart(arm, picture, sorted({b for _, bits in rows for b in bits}), desc)
