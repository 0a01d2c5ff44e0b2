"""Are two arms different, by how much, and how small a difference could this many prompts have shown?

Arms answer the same prompts in the same order, so everything is paired. Tests, intervals and corrections are those of
scipy and statsmodels; what is here says what they mean for a comparison of accuracies.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.stats import bootstrap, norm
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from lamina.errors import DataError

RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """An arm against a baseline on n prompts that both answered.

    Attributes
    ----------
    n : int
        Prompts.
    baseline, arm : float
        Accuracies.
    difference : Interval
        The arm's accuracy less the baseline's, with a paired bootstrap interval.
    gained, lost : int
        Prompts that only the arm, or only the baseline, answered right.
    odds_ratio : float
        gained / lost, infinite where none was lost; nan where the arms never differ.
    p : float
        Exact McNemar test, two-sided; 1 where the arms never differ.
    detectable : float or None
        Smallest difference in accuracy that this many prompts would have shown with ``power``, given how often the arms
        differ; None if no difference would have been.
    p_holm : float
        ``p`` corrected for all arms that were compared with the baseline.
    """

    n: int
    baseline: float
    arm: float
    difference: Interval
    gained: int
    lost: int
    odds_ratio: float
    p: float
    detectable: float | None
    p_holm: float

    def verdict(self, alpha: float = 0.05) -> str:
        """One line that does not sell ignorance as equality."""
        if self.p_holm < alpha:
            return f"{'better' if self.difference.mean > 0 else 'worse'} by {abs(self.difference.mean):.1%}"
        if self.detectable is None:
            return f"undecided: {self.n} prompts cannot show any difference between arms that differ this seldom"
        return f"undecided: {self.n} prompts show differences from {self.detectable:.1%} on"


def compare(
    baseline: Sequence[bool],
    arms: Mapping[str, Sequence[bool]],
    *,
    alpha: float = 0.05,
    power: float = 0.8,
    seed: int = 0,
) -> dict[str, Comparison]:
    """Compare arms with a baseline, prompt by prompt.

    Parameters
    ----------
    baseline : sequence of bool
        Which prompts it answered right.
    arms : mapping
        Name -> the same for the same prompts, in the same order.
    alpha, power : float
        Of the tests, and of the smallest detectable difference.
    seed : int
        Of the bootstrap.

    Raises
    ------
    DataError
        If an arm has other prompts, or there are none.
    """
    reference = np.asarray(baseline, dtype=bool)
    if not len(reference):
        raise DataError("there are no answers to compare; run the evaluation first")
    found = {}
    for name, given in arms.items():
        answers = np.asarray(given, dtype=bool)
        if answers.shape != reference.shape:
            raise DataError(
                f"{name} answered {len(answers)} prompts and the baseline {len(reference)}: a paired comparison needs "
                "the same ones; let both runs finish"
            )
        found[name] = _one(reference, answers, alpha, power, seed)
    corrected = holm([c.p for c in found.values()])
    return {
        name: Comparison(**{**vars(c), "p_holm": p}) for (name, c), p in zip(found.items(), corrected, strict=True)
    }  # fmt: skip


def _one(reference: np.ndarray, answers: np.ndarray, alpha: float, power: float, seed: int) -> Comparison:
    gained, lost = int((answers & ~reference).sum()), int((reference & ~answers).sum())
    n = len(reference)
    ratio = gained / lost if lost else (math.inf if gained else math.nan)
    return Comparison(
        n=n, baseline=float(reference.mean()), arm=float(answers.mean()),
        difference=interval(answers.astype(float) - reference, 1 - alpha, seed), gained=gained, lost=lost,
        odds_ratio=ratio, p=exact_mcnemar(gained, lost),
        detectable=detectable_difference(n, (gained + lost) / n, alpha=alpha, power=power), p_holm=math.nan,
    )  # fmt: skip


def exact_mcnemar(gained: int, lost: int) -> float:
    """Two-sided p-value of the exact McNemar test, from the two counts of prompts on which a pair of arms differs."""
    return float(mcnemar([[0, gained], [lost, 0]], exact=True).pvalue) if gained + lost else 1.0


def interval(values: Sequence[float] | np.ndarray, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Mean of paired differences, or of anything else by prompt, with a percentile bootstrap interval over prompts."""
    x = np.asarray(values, dtype=float)
    mean = float(x.mean())
    if len(x) < 2 or bool((x == x[0]).all()):
        return Interval(mean, mean, mean)
    found = bootstrap(
        (x,), np.mean, confidence_level=confidence, n_resamples=RESAMPLES, method="percentile",
        rng=np.random.default_rng(seed), vectorized=True, batch=max(1, 10**7 // len(x)),
    ).confidence_interval  # fmt: skip
    return Interval(mean, float(found.low), float(found.high))


def proportion(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Share of right answers with Wilson's interval, which has a width where all are right or all wrong too."""
    low, high = proportion_confint(sum(values), len(values), 1 - confidence, method="wilson")
    return Interval(float(np.mean(values)), float(low), float(high))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction of p-values of one family."""
    return [float(p) for p in multipletests(p_values, method="holm")[1]] if len(p_values) else []


def detectable_difference(n: int, discordant: float, *, alpha: float = 0.05, power: float = 0.8) -> float | None:
    """Smallest difference in accuracy that McNemar's test finds with ``power`` (Connor 1987).

    Parameters
    ----------
    n : int
        Prompts.
    discordant : float
        Share of prompts on which the arms differ.
    alpha, power : float
        Of the test.

    Returns
    -------
    float or None
        A share of the prompts; None if even arms that differ in one direction alone would not be found.
    """
    z_alpha, z_power = norm.ppf(1 - alpha / 2), norm.ppf(power)

    def surplus(d: float) -> float:
        return float(
            math.sqrt(n) * d - z_alpha * math.sqrt(discordant) - z_power * math.sqrt(max(discordant - d * d, 0))
        )

    return float(brentq(surplus, 0, discordant)) if discordant > 0 and surplus(discordant) >= 0 else None
