"""Spread over orders, by hand."""

from typing import Any

import pytest

from lamina.eval.log import Log
from lamina.eval.orders import as_markdown, order_spreads

RIGHT = {0: (True, True, False), 1: (True, False, False), 2: (True, True, True)}
TIERS = {0: [[2, 4], [2, 2]], 1: [[2, 4], [8, 2]], 2: [[2, 2], [2, 2]]}


def records() -> list[dict[str, Any]]:
    found = []
    for order, right in RIGHT.items():
        for i in range(3):
            record = {"kind": "answer" if order == 0 else "reordered", "task": "t", "arm": "lamina-live", "seed": 0}
            record |= {"item": f"i{i}", "right": right[i], "bits_history": 2.0 + order + i, "controller": {}}
            record |= {"tiers": TIERS[order] if i == 2 else [[2, 2], [2, 2]]} | ({"order": order} if order else {})
            found.append(record)
    return found


def test_spread_by_hand(tmp_path: Any) -> None:
    log = Log(tmp_path / "log.jsonl", {})
    for record in records():
        log.append(record)
    log.append(records()[3] | {"order": 3})
    log.append(records()[0] | {"arm": "bf16"} | {"controller": {}})
    (spread,) = order_spreads(log)
    assert (spread.orders, spread.prompts) == (3, 3), "an order that is not finished does not count"
    assert spread.accuracy.values == pytest.approx([2 / 3, 1 / 3, 1])
    assert (spread.accuracy.least, spread.accuracy.most) == pytest.approx((1 / 3, 1))
    assert spread.accuracy.mean.mean == pytest.approx(2 / 3) and spread.accuracy.mean.low < spread.accuracy.mean.high
    assert spread.bits is not None and spread.bits.values == [3.0, 4.0, 5.0]
    assert spread.decided is not None and spread.decided.values == [2.5, 4.0, 2.0]
    assert spread.turned == 2
    # Of four places two end alike in three orders, two in two of three.
    assert spread.settled == pytest.approx((1 + 2 / 3 + 2 / 3 + 1) / 4)
    assert "right 66.7% (95 % 33.3% to 100.0%, orders 33.3% to 100.0%)" in as_markdown([spread])
