"""Policies against exhaustive search and hand-made sequences."""

import itertools
import math
import random

import pytest

from lamina.control.config import ControllerConfig
from lamina.control.policies import allocate, hysteresis, threshold, vote
from lamina.control.tau import sqrt_tau
from lamina.errors import ConfigError


def test_threshold_takes_the_fewest_bits_below_tau() -> None:
    signal = {2: 0.3, 4: 0.02, 8: 0.0001}
    assert [threshold(signal, tau, (2, 4, 8), 8) for tau in (1, 0.3, 0.021, 0.02, 1e-5)] == [2, 4, 4, 8, 8]
    assert threshold(signal, 0.1, (8, 4), 8) == 4 and threshold(signal, 1e-9, (2, 4), 2) == 2
    assert threshold({2: math.nan, 4: 0.1, 8: 0.0}, 1, (2, 4, 8), 8) == 4, "what is not a number is not below"


def test_hysteresis_goes_up_at_once_and_down_when_calm() -> None:
    def step(signal: dict[int, float], current: int, calm: bool) -> tuple[int, int | None]:
        return hysteresis(signal, current, 0.1, (2, 4, 8), 8, calm=calm, demote_below=0.5)

    assert step({2: 0.2, 4: 0.01, 8: 0.0}, 2, calm=False) == (4, None)
    assert step({2: 0.09, 4: 0.01, 8: 0.0}, 4, calm=True) == (4, None), "between the two thresholds nothing moves"
    assert step({2: 0.04, 4: 0.01, 8: 0.0}, 4, calm=False) == (4, 2)
    assert step({2: 0.04, 4: 0.01, 8: 0.0}, 4, calm=True) == (2, 2)
    assert step({2: 0.2, 4: 0.04, 8: 0.0}, 8, calm=True) == (4, 4)
    assert step({2: 9.0, 4: 9.0, 8: 9.0}, 4, calm=True) == (8, None)


def test_votes_tie_to_more_bits() -> None:
    assert [vote(x) for x in ([2], [2, 4], [2, 2, 4], [8, 2, 4], [4, 4, 2, 2, 8])] == [2, 4, 2, 8, 4]


@pytest.mark.parametrize("seed", range(20))
def test_allocation_is_the_best_for_what_it_spends(seed: int) -> None:
    """Against all assignments: none that spends no more has a lower sum."""
    rng = random.Random(seed)
    signals = []
    for _ in range(5):
        a = rng.random() ** 3
        signals.append({2: a, 4: a * rng.random(), 8: 0.0})
        signals[-1][8] = signals[-1][4] * rng.random()
    sizes = [1.0] * 5
    for target in (2.0, 2.4, 3.0, 4.4, 8.0):
        chosen = allocate(signals, sizes, target, (2, 4, 8))
        spent = sum(chosen)
        assert spent <= 5 * target + 1e-9

        def drift(bits: tuple[int, ...]) -> float:
            return sum(s[b] for s, b in zip(signals, bits))

        best = min(drift(x) for x in itertools.product((2, 4, 8), repeat=5) if sum(x) <= spent)
        # The hull is left only by the last step, which is the one that had to be smaller than the steepest.
        assert drift(tuple(chosen)) <= best + max(s[2] for s in signals) * 1e-9 or spent > 5 * target - 6


def test_allocation_weighs_sizes_and_ignores_what_is_no_number() -> None:
    signals = [{2: 1.0, 4: 0.1, 8: 0.0}, {2: 1.0, 4: 0.1, 8: 0.0}]
    assert allocate(signals, [1, 10], 2 + 2 / 11, (2, 4, 8)) == [4, 2]
    assert allocate([{2: 1.0, 4: math.nan, 8: 0.5}], [1], 8, (2, 4, 8)) == [8]
    assert allocate(signals, [1, 1], 8, (2, 4)) == [4, 4] and allocate([], [], 3, (2, 4)) == []
    assert allocate([{2: 0.0, 4: 0.0, 8: 0.0}], [1], 8, (2, 4, 8)) == [2], "nothing is spent for nothing"


def test_tau_follows_the_context() -> None:
    assert sqrt_tau(0.022, 100, 4096) == sqrt_tau(0.022, 4096, 4096) == 0.022
    assert sqrt_tau(0.022, 131072, 4096) == pytest.approx(0.12445, rel=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"tiers": x} for x in (5, (2, "4"), (3,))),
        *({"rate": x} for x in ("x", 0)),
        *({"tau0": x} for x in (None, math.nan)),
        *({"target_bits": x} for x in (None, 1.5)),
        *({"policy": x} for x in (["x"], "best")),
        *({"votes": x} for x in (2.5, 0)),
        *({"dwell": x} for x in (math.nan, -1)),
        *({"seed": None}, {"fallback": 3}, {"alpha": 2}, {"tau_context": math.inf}),
    ],
    ids=str,
)
def test_wrong_settings_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ControllerConfig(**wrong)  # type: ignore[arg-type]
