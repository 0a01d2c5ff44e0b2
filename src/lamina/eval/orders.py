"""What the order of prompts does to a live controller: spread of right answers, bits and tiers over orders."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lamina.eval.log import Log, Written
from lamina.eval.statistics import Interval, interval
from lamina.eval.summary import is_simulated, shown_name


@dataclass(frozen=True)
class Spread:
    """A figure over orders: its mean with a bootstrap interval over orders, and the figure of every order."""

    mean: Interval
    values: list[float]

    @property
    def least(self) -> float:
        """The smallest."""
        return min(self.values)

    @property
    def most(self) -> float:
        """The largest."""
        return max(self.values)


@dataclass(frozen=True)
class OrderSpread:
    """One live arm on one task: the same prompts in several orders, the controller anew in each.

    Attributes
    ----------
    task, arm : str
        Names.
    simulated : bool
        Whether the arm was simulated instead of stored.
    seed, prompts, orders : int
        Which prompts, how many, and in how many orders all of them were answered.
    accuracy : Spread
        Share of right answers.
    bits, decided : Spread or None
        Bits an element of packed tokens, and average bits that the controller ended with; None where there are none.
    turned : int
        Prompts that are answered right in some orders and wrong in others.
    settled : float
        Share of layers and sides, over orders, that end with the tier most frequent at that place.
    tiers : list
        What each order ended with: bits of K and V by packed layer.
    """

    task: str
    arm: str
    simulated: bool
    seed: int
    prompts: int
    orders: int
    accuracy: Spread
    bits: Spread | None
    decided: Spread | None
    turned: int
    settled: float
    tiers: list[list[tuple[int, int]]]


def order_spreads(log: Log | Written) -> list[OrderSpread]:
    """Spreads of every arm, task and seed with more than one finished order."""
    found: dict[tuple[str, str, int], dict[int, dict[str, dict[str, Any]]]] = {}
    for r in log.records:
        if r.get("kind") in ("answer", "reordered") and "controller" in r:
            orders = found.setdefault((r["task"], r["arm"], r["seed"]), {})
            orders.setdefault(r.get("order", 0), {})[r["item"]] = r
    spreads = []
    for key, by_order in found.items():
        whole = [
            list(by_order[o].values()) for o in sorted(by_order) if by_order[o].keys() == by_order.get(0, {}).keys()
        ]
        if len(whole) > 1:
            spreads.append(_spread(*key, whole))
    return spreads


def _spread(task: str, arm: str, seed: int, orders: list[list[dict[str, Any]]]) -> OrderSpread:
    """Of answers by order, each in the order in which they were given."""
    right = [{r["item"]: bool(r["right"]) for r in given} for given in orders]
    tiers = [[(k, v) for k, v in given[-1]["tiers"]] for given in orders]
    places = [Counter(column) for column in zip(*([bits for pair in vector for bits in pair] for vector in tiers))]
    return OrderSpread(
        task, arm, is_simulated(arm, orders[0]), seed, len(right[0]), len(orders),
        _over([float(np.mean(list(given.values()))) for given in right]),
        _over_known([[r["bits_history"] for r in given] for given in orders]),
        _over([float(np.mean(vector)) for vector in tiers]) if places else None,
        turned=sum(len({given[item] for given in right}) > 1 for item in right[0]),
        settled=float(np.mean([max(place.values()) / len(orders) for place in places])) if places else 1.0,
        tiers=tiers,
    )  # fmt: skip


def _over(values: list[float]) -> Spread:
    return Spread(interval(values), values)


def _over_known(by_order: Sequence[list[float | None]]) -> Spread | None:
    """Means over prompts, of those where something was packed."""
    known = [[x for x in given if x is not None] for given in by_order]
    return _over([float(np.mean(given)) for given in known]) if all(known) else None


def as_markdown(spreads: Sequence[OrderSpread]) -> str:
    """A line an arm, empty without any."""
    return "".join(
        f"\n{shown_name(s.arm, s.simulated)} on {s.task}, seed {s.seed}, {s.prompts} prompts in {s.orders} orders: "
        f"right {_percent(s.accuracy)}, bits {_figure(s.bits)}, decided {_figure(s.decided)}; {s.turned} prompts turn\n"
        for s in spreads
    )


def _percent(x: Spread) -> str:
    return f"{x.mean.mean:.1%} (95 % {x.mean.low:.1%} to {x.mean.high:.1%}, orders {x.least:.1%} to {x.most:.1%})"


def _figure(x: Spread | None) -> str:
    if x is None:
        return "–"
    return f"{x.mean.mean:.2f} (95 % {x.mean.low:.2f} to {x.mean.high:.2f}, orders {x.least:.2f} to {x.most:.2f})"
