"""Live arms over orders of the same prompts: spread of right answers, bits and tiers."""

from collections.abc import Sequence

from lamina.app.report.evaluation_tables import NONE, Table
from lamina.app.report.evaluation_tiers import TierPart, tier_part
from lamina.eval.orders import OrderSpread, Spread
from lamina.eval.summary import shown_name


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


def orders_parts(found: Sequence[OrderSpread], packed: Sequence[int] | None) -> list[TierPart]:
    """A picture an arm: tiers that every order ended with, a row an order for K and then one for V."""
    return [_part(s, packed) for s in found if s.tiers and s.tiers[0]]


def _part(s: OrderSpread, packed: Sequence[int] | None) -> TierPart:
    rows = [
        (f"{name} {i}", [pair[side] for pair in vector])
        for side, name in enumerate("KV")
        for i, vector in enumerate(s.tiers, 1)
    ]
    pitch = max(4.0, min(14.0, 240 / len(rows)))
    return tier_part(shown_name(s.arm, s.simulated), rows, packed, orders_in_words(s), pitch)


def _cells(x: Spread | None, factor: float, unit: str, digits: int) -> tuple[str, ...]:
    if x is None:
        return (NONE,) * 4
    mean, low, high, least, most = (
        f"{factor * v:.{digits}f}" for v in (x.mean.mean, x.mean.low, x.mean.high, x.least, x.most)
    )
    return f"{mean}{unit}", f"{low} to {high}{unit}", f"{least}{unit}", f"{most}{unit}"
