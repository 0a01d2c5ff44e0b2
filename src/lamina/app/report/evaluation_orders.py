"""Live arms over orders of the same prompts: spread of right answers, bits and tiers."""

from collections.abc import Sequence
from dataclasses import dataclass

from lamina.app.report.evaluation_tables import NONE, Table
from lamina.app.report.strips import Strips, lay_out_strips
from lamina.eval.orders import OrderSpread, Spread
from lamina.eval.summary import shown_name

MOST_LAYER_TICKS = 10


@dataclass(frozen=True)
class OrdersPart:
    """One arm: tiers that every order ended with, a row an order for K and then one for V."""

    arm: str
    picture: Strips
    bits: list[int]
    desc: str


def orders_table(found: Sequence[OrderSpread]) -> Table:
    """A row an arm and figure."""
    header = ("arm", "figure", "orders", "mean", "95 % over orders", "least", "most")
    rows = []
    for s in found:
        name = shown_name(s.arm, s.simulated)
        rows += [
            (name, "right", str(s.orders), *_cells(s.accuracy, 100, "%", 1)),
            (name, "bits", str(s.orders), *_cells(s.bits, 1, "", 2)),
            (name, "bits decided at the end", str(s.orders), *_cells(s.decided, 1, "", 2)),
        ]
    return Table(header, rows)


def orders_in_words(s: OrderSpread) -> str:
    """What the table does not hold."""
    return (
        f"{shown_name(s.arm, s.simulated)}: {s.turned} of {s.prompts} prompts are right in some orders and wrong in "
        f"others; {s.settled:.0%} of tiers at the end are the most frequent ones of their layer and side"
    )


def orders_parts(found: Sequence[OrderSpread], packed: Sequence[int] | None) -> list[OrdersPart]:
    """A picture an arm."""
    return [_part(s, packed) for s in found if s.tiers and s.tiers[0]]


def _part(s: OrderSpread, packed: Sequence[int] | None) -> OrdersPart:
    n = len(s.tiers[0])
    layers = packed if packed is not None and len(packed) == n else range(n)
    every = next(step for step in (1, 2, 5, 10, 20, 50, n) if n / step <= MOST_LAYER_TICKS)
    rows = [
        (f"{name} {i}", [(j, pair[side]) for j, pair in enumerate(vector)])
        for side, name in enumerate("KV")
        for i, vector in enumerate(s.tiers, 1)
    ]
    bits = sorted({b for vector in s.tiers for pair in vector for b in pair})
    ticks = [(i + 0.5, str(layers[i])) for i in range(0, n, every)]
    pitch = max(4.0, min(14.0, 240 / len(rows)))
    return OrdersPart(
        shown_name(s.arm, s.simulated), lay_out_strips(rows, n, ticks, pitch=pitch), bits, orders_in_words(s)
    )


def _cells(x: Spread | None, factor: float, unit: str, digits: int) -> tuple[str, ...]:
    if x is None:
        return (NONE,) * 4
    mean, low, high, least, most = (
        f"{factor * v:.{digits}f}" for v in (x.mean.mean, x.mean.low, x.mean.high, x.least, x.most)
    )
    return f"{mean}{unit}", f"{low} to {high}{unit}", f"{least}{unit}", f"{most}{unit}"
