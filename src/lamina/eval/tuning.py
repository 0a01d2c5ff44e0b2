"""Tuning: what drift in each layer means for the model's output, and controller settings that meet a goal.

A layer's signals say how far its own attention drifts. What that does to the model's next-token distribution differs
between layers by orders of magnitude, and it is nearly additive: so each layer and side is measured once with its pages
at 2 bits and all others at 8, and its signals are weighted with what came out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lamina.basis.profile import Profile
from lamina.basis.tuning import Tuning
from lamina.codec import TIERS
from lamina.control.config import ControllerConfig, Policy
from lamina.control.policies import threshold
from lamina.control.state import Controller, Firing
from lamina.control.tuning import as_settings, initial_tiers
from lamina.engines.hf import LaminaCache
from lamina.errors import ConfigError, DataError
from lamina.eval.arms import ARMS, LiveArm
from lamina.eval.fidelity import ArmResult, measure_fidelity
from lamina.pages import WindowConfig

ARMS_AT_ONCE = 16
MOST_TRIALS = 6
CLOSE = 0.9
"""Share of a KL budget that is near enough to stop looking for a larger threshold."""

Progress = Callable[[str, int, int], Any]
"""Called with what goes on, tokens done, and tokens in all."""


@dataclass(frozen=True)
class FixedArm(LiveArm):
    """A tier vector, and optionally an ear for its signals.

    Attributes
    ----------
    vector : tuple of (int, int)
        Bits of K and V, one pair a layer of the model.
    heard : list of Firing or None
        Where the signals go.
    """

    vector: tuple[tuple[int, int], ...] = ()
    heard: list[Firing] | None = None

    def open(self, model: PreTrainedModel, profile: Profile, window: WindowConfig) -> Callable[[], Any]:
        """Caches at this tier vector."""

        def new() -> LaminaCache:
            controller = None
            if self.heard is not None:
                # Everything is below this threshold, so the tiers stay at the lowest.
                config = ControllerConfig(policy=Policy.THRESHOLD, tau0=math.inf)
                controller = Controller(config, [self.vector[i] for i in profile.packed])
            cache = LaminaCache(model, profile, tiers=list(self.vector), window=window, controller=controller)
            if cache.control is not None and self.heard is not None:
                cache.control.on_firing = self.heard.append
            return cache

        return new


def measure_weights(
    model: PreTrainedModel,
    profile: Profile,
    sequences: Sequence[Tensor],
    *,
    window: WindowConfig | None = None,
    progress: Progress | None = None,
) -> tuple[list[tuple[float, float]], list[list[float]]]:
    """Weights and drift of every packed layer, as :class:`lamina.basis.tuning.Tuning` keeps them.

    Parameters
    ----------
    model, profile
        The model and its profile.
    sequences : sequence of Tensor
        int64 ``[1, T]``, text that the profile was not calibrated on; longer than the exact windows.
    window : WindowConfig
        Exact windows.
    progress : callable
        See :data:`Progress`.
    """
    layers, low, high = list(profile.packed), TIERS[0], TIERS[-1]
    heard: list[Firing] = []
    base = [(high, high)] * len(profile.layers)
    arms = [FixedArm("signals", "", (low, low), vector=((low, low),) * len(base), heard=heard)]
    arms.append(FixedArm("rest", "", (high, high), vector=tuple(base)))
    for i in layers:
        for side in (0, 1):
            pair = (low, high) if side == 0 else (high, low)
            arms.append(FixedArm(f"{i}.{side}", "", pair, vector=(*base[:i], pair, *base[i + 1 :])))
    total = sum(s.numel() for s in sequences) * len(arms)
    kl: dict[str, float] = {}
    done = 0
    for n in range(0, len(arms), ARMS_AT_ONCE):
        group = arms[n : n + ARMS_AT_ONCE]

        def report(tokens: int, before: int = done, size: int = len(group)) -> None:
            if progress is not None:
                progress("Measuring what each layer's drift does", before + tokens * size, total)

        for result in measure_fidelity(model, profile, group, sequences, window=window, progress=report):
            kl[result.name] = result.kl_mean
        done += sum(s.numel() for s in sequences) * len(group)
    if not heard:
        raise DataError("the text is too short to tune on: nothing left the exact windows; raise --seq-len")
    rows = [[f.signals[i] for f in heard if f.signals[i]] for i in range(2 * len(layers))]
    signals = torch.tensor(
        [torch.tensor(row, dtype=torch.float64).mean(0).tolist() if row else [0.0] * len(TIERS) for row in rows],
        dtype=torch.float64,
    )
    cost = torch.tensor([[max(kl[f"{i}.{s}"] - kl["rest"], 0.0) for s in (0, 1)] for i in layers], dtype=torch.float64)
    weights = cost / signals[:, 0].view(-1, 2).clamp(min=1e-12)
    drift = signals * weights.view(-1, 1)
    return [(float(k), float(v)) for k, v in weights], drift.tolist()


def tune_to_bits(profile: Profile, target_bits: float) -> Profile:
    """A profile whose controller spends ``target_bits`` on average; ``profile`` has weights already."""
    return with_controller(profile, ControllerConfig(policy=Policy.ALLOCATE, target_bits=target_bits))


def tune_to_kl(
    model: PreTrainedModel,
    profile: Profile,
    texts: Sequence[Sequence[Tensor]],
    max_kl: float,
    *,
    policy: Policy = Policy.THRESHOLD,
    window: WindowConfig | None = None,
    progress: Progress | None = None,
) -> tuple[Profile, list[ArmResult]]:
    """Find the largest threshold with which a live run stays within ``max_kl`` on every one of ``texts``.

    Parameters
    ----------
    model, profile
        The model, and its profile with weights.
    texts : sequence
        Texts of several kinds, each some int64 ``[1, T]``.
    max_kl : float
        Mean KL of the next-token distribution, in nats.
    policy : Policy
        ``threshold``, ``hysteresis`` or ``vote``.
    window, progress
        As in :func:`measure_weights`.

    Returns
    -------
    profile : Profile
        With the settings and the tiers to start with.
    results : list of ArmResult
        What the run with them showed, one a text.

    Raises
    ------
    ConfigError
        If even 8 bits everywhere do not stay within the budget.
    """
    tuning = _tuning_of(profile)
    if not (isinstance(max_kl, int | float) and 0 < max_kl < math.inf):
        raise ConfigError(f"max_kl={max_kl!r} must be a positive number of nats")
    if policy == Policy.ALLOCATE:
        raise ConfigError("policy 'allocate' spends bits, it has no threshold; give target_bits, or another policy")
    signals = [dict(zip(TIERS, row)) for row in tuning.drift]
    total = sum(s.numel() for text in texts for s in text)

    def at(tau: float) -> Profile:
        return with_controller(profile, ControllerConfig(policy=policy, tau0=tau))

    def trial(n: int, tau: float) -> list[ArmResult]:
        results, done = [], 0
        for text in texts:

            def report(tokens: int, before: int = done) -> None:
                if progress is not None:
                    progress(f"Run {n + 1} at threshold {tau:.2g}", before + tokens, total)

            results += measure_fidelity(model, at(tau), [LIVE], text, window=window, progress=report)
            done += sum(s.numel() for s in text)
        return results

    drifts = [x for s in signals for x in s.values()]
    tau, low, high = _predicted(signals, max_kl), 0.0, math.inf
    best: tuple[float, list[ArmResult]] | None = None
    for n in range(MOST_TRIALS):
        results = trial(n, tau)
        worst = max(r.kl_mean for r in results)
        if worst <= max_kl:
            low, best = tau, (tau, results)
            if worst >= CLOSE * max_kl or min(r.tier_mean for r in results) <= TIERS[0]:
                break
        else:
            high = tau
        step = min(8.0, max(1 / 8, (0.95 * max_kl / max(worst, 1e-12)) ** 1.2))
        if low == 0:
            # The KL falls in steps, where a side's drift is passed: go below the next one, and faster each time.
            step = min(step, 0.99 * max((d for d in drifts if d < tau), default=tau) / tau, 0.7**n)
        tau = tau * step if low < tau * step < high else math.sqrt(max(low, tau / 64) * min(high, tau * 64))
    if best is None:
        tau = 0.5 * min((d for d in drifts if d > 0), default=tau)
        results = trial(MOST_TRIALS, tau)
        worst = max(r.kl_mean for r in results)
        if worst > max_kl:
            raise ConfigError(
                f"no threshold keeps the mean KL within {max_kl:g} on this text: at {tau:.2g}, with all at "
                f"{TIERS[-1]} bits, it is {worst:.2g}; raise --max-kl"
            )
        best = tau, results
    return at(best[0]), best[1]


LIVE = ARMS["lamina-live"]


def _predicted(signals: Sequence[dict[int, float]], max_kl: float) -> float:
    """Largest threshold whose tiers are predicted to stay within a budget."""
    candidates = sorted({x for s in signals for x in s.values() if x > 0}) or [max_kl]
    fits = [t for t in candidates if sum(s[threshold(s, t, TIERS, TIERS[-1])] for s in signals) <= max_kl]
    return fits[-1] if fits else candidates[0]


def _tuning_of(profile: Profile) -> Tuning:
    if profile.tuning is None:
        raise ConfigError("the profile has no weights; measure them first with measure_weights")
    return profile.tuning


def with_controller(profile: Profile, config: ControllerConfig) -> Profile:
    """A profile with weights, with a controller and the tiers that it starts with."""
    tuning = _tuning_of(profile)
    sizes = [float(layer.n_kv_heads * layer.head_dim) for layer in profile.packed.values()]
    pairs = iter(initial_tiers(config, tuning.drift, sizes))
    tiers = [next(pairs) if i in profile.packed else pair for i, pair in enumerate(profile.tiers)]
    return replace(profile, tiers=tiers, tuning=replace(tuning, settings=as_settings(config)))
