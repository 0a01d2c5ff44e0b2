"""Comparisons of arms against scipy, statsmodels and sums by hand, on random tables; what few prompts cannot show."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest, bootstrap
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests

from lamina.errors import DataError
from lamina.eval.statistics import RESAMPLES, compare, detectable_difference, exact_mcnemar, holm, interval


def answers(rng: np.random.Generator, n: int, accuracy: float) -> np.ndarray:
    return rng.random(n) < accuracy


@pytest.mark.parametrize("seed", range(8))
def test_random_tables(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(20, 400))
    base = answers(rng, n, 0.6)
    arms = {f"arm {i}": np.where(rng.random(n) < 0.2, answers(rng, n, 0.4 + 0.1 * i), base) for i in range(4)}
    found = compare(base.tolist(), {name: x.tolist() for name, x in arms.items()})
    p_values = []
    for name, x in arms.items():
        c = found[name]
        b, d = sum(x[i] and not base[i] for i in range(n)), sum(base[i] and not x[i] for i in range(n))
        assert (c.n, c.gained, c.lost) == (n, b, d)
        assert c.difference.mean == pytest.approx((b - d) / n) == c.arm - c.baseline
        assert c.p == pytest.approx(binomtest(min(b, d), b + d, 0.5).pvalue if b + d else 1)
        table = [[int((base & x).sum()), d], [b, int((~base & ~x).sum())]]
        assert c.p == pytest.approx(mcnemar(table, exact=True).pvalue)
        assert c.difference.low <= c.difference.mean <= c.difference.high
        p_values.append(c.p)
    expected = multipletests(p_values, method="holm")[1]
    np.testing.assert_allclose([c.p_holm for c in found.values()], expected)
    order = np.argsort(p_values)
    by_hand = np.maximum.accumulate([min(1, (4 - k) * p_values[i]) for k, i in enumerate(order)])
    np.testing.assert_allclose(np.array(holm(p_values))[order], by_hand)


def test_the_interval_is_that_of_the_normal_law_for_many_prompts() -> None:
    x = np.random.default_rng(0).choice([-1.0, 0.0, 1.0], 3000, p=[0.1, 0.75, 0.15])
    found, half = interval(x), 1.96 * x.std() / math.sqrt(3000)
    assert found.low == pytest.approx(x.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(x.mean() + half, abs=0.1 * half)
    assert interval(x, seed=1) == interval(x, seed=1) != interval(x, seed=2)
    assert interval(x, 0.5).low > found.low
    for same in ([0.0], [1.0, 1.0, 1.0]):
        assert interval(same).low == interval(same).high == same[0]


@pytest.mark.parametrize("seed", range(4))
def test_the_interval_is_scipys_and_that_of_resampling_by_hand(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.choice([-1.0, 0.0, 1.0], int(rng.integers(30, 300)), p=[0.15, 0.6, 0.25])
    found = interval(x, seed=seed)
    theirs = bootstrap(
        (x,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(seed), vectorized=True,
        batch=10**7 // len(x),
    ).confidence_interval  # fmt: skip
    assert (found.low, found.high) == (theirs.low, theirs.high)
    means = x[rng.integers(0, len(x), (20_000, len(x)))].mean(1)
    width = float(means.std())
    assert np.quantile(means, [0.025, 0.975]) == pytest.approx([found.low, found.high], abs=0.1 * width)


def planted(n: int) -> tuple[list[bool], list[bool]]:
    """An arm that loses 3 % of the prompts and wins none."""
    base = [i % 10 < 6 for i in range(n)]
    lost = {i for i in range(n) if base[i]}
    lost = set(sorted(lost)[: round(0.03 * n)])
    return base, [x and i not in lost for i, x in enumerate(base)]


def test_three_points_are_found_among_500_and_not_among_50() -> None:
    base, arm = planted(500)
    found = compare(base, {"arm": arm})["arm"]
    assert found.difference.mean == pytest.approx(-0.03) and found.p_holm < 0.001
    assert found.verdict() == "worse by 3.0%" and found.detectable is not None and found.detectable < 0.03
    base, arm = planted(50)
    found = compare(base, {"arm": arm})["arm"]
    assert found.p_holm > 0.05 and "undecided: 50 prompts" in found.verdict()
    assert found.detectable is None or found.detectable > 0.03


@pytest.mark.parametrize(("n", "discordant"), [(200, 0.2), (500, 0.1), (1000, 0.3)])
def test_the_detectable_difference_is_detected_with_its_power(n: int, discordant: float) -> None:
    d = detectable_difference(n, discordant)
    assert d is not None and 0 < d < discordant
    rng, hits = np.random.default_rng(0), 0
    for _ in range(2000):
        gained, lost, _ = rng.multinomial(n, [(discordant + d) / 2, (discordant - d) / 2, 1 - discordant])
        hits += exact_mcnemar(int(gained), int(lost)) < 0.05
    assert 0.7 < hits / 2000 < 0.85, "the exact test is somewhat more careful than the formula's"
    smaller = detectable_difference(4 * n, discordant)
    assert smaller == pytest.approx(d / 2, rel=0.1)


def test_arms_that_never_differ() -> None:
    found = compare([True, False] * 50, {"same": [True, False] * 50})["same"]
    assert found.p == found.p_holm == 1 and math.isnan(found.odds_ratio)
    assert found.detectable is None and "cannot show any difference" in found.verdict()
    only = compare([False] * 40, {"arm": [True] * 40})["arm"]
    assert only.odds_ratio == math.inf and only.verdict() == "better by 100.0%"


def test_what_cannot_be_paired() -> None:
    with pytest.raises(DataError, match="arm answered 2 prompts and the baseline 3"):
        compare([True] * 3, {"arm": [True] * 2})
    with pytest.raises(DataError, match="no answers"):
        compare([], {})
    assert compare([True], {}) == {} and holm([]) == []
