"""Settings of the live controller."""

from dataclasses import dataclass
from enum import StrEnum

from lamina.codec import TIERS
from lamina.errors import ConfigError


class Canary(StrEnum):
    """What drift is measured on: a sequence's last keys (EchoKV), or all packed rows as attention weighs them."""

    RING = "ring"
    ANCHORED = "anchored"


class Policy(StrEnum):
    """How signals become tiers."""

    THRESHOLD = "threshold"
    HYSTERESIS = "hysteresis"
    VOTE = "vote"
    ALLOCATE = "allocate"


class TauRule(StrEnum):
    """How the threshold follows the context: not at all, or with its square root."""

    FIXED = "fixed"
    SQRT = "sqrt"


class Schedule(StrEnum):
    """When the controller fires: every 1/rate decode steps, or at random with that rate."""

    PERIODIC = "periodic"
    BERNOULLI = "bernoulli"


@dataclass(frozen=True)
class ControllerConfig:
    """How precision is decided while the model runs (Lamina SPEC 6).

    Attributes
    ----------
    canary, policy, tau_rule, schedule : str
        See :class:`Canary`, :class:`Policy`, :class:`TauRule`, :class:`Schedule`.
    tied : bool
        One tier for K and V of a layer, from K's signal (EchoKV).
    tiers : tuple of int
        Tiers to choose from, out of 2, 4 and 8 bits.
    fallback : int
        Tier where no candidate is below the threshold.
    rate : float
        Share of decode steps that fire, in (0, 1].
    seed : int
        Of the ``bernoulli`` schedule.
    alpha : float
        Weight of a new sample in the moving average; the first one initialises it.
    tau0, tau_context : float, int
        Threshold in nats, and the context at which it holds under ``sqrt``; below it the threshold is tau0.
    demote_below, patience, dwell : float, int, int
        ``hysteresis``: a layer goes down when its signal was below ``demote_below`` * tau for ``patience`` firings in
        a row and it has kept its tier for ``dwell``.
    votes : int
        ``vote``: majority of that many last decisions, ties to more bits.
    target_bits : float
        ``allocate``: average tier over all layers and sides.
    """

    canary: Canary = Canary.ANCHORED
    policy: Policy = Policy.ALLOCATE
    tau_rule: TauRule = TauRule.FIXED
    schedule: Schedule = Schedule.PERIODIC
    tied: bool = False
    tiers: tuple[int, ...] = TIERS
    fallback: int = 8
    rate: float = 1 / 64
    seed: int = 0
    alpha: float = 0.1
    tau0: float = 0.022
    tau_context: int = 4096
    demote_below: float = 0.35
    patience: int = 4
    dwell: int = 6
    votes: int = 5
    target_bits: float = 3.0

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("rate", "alpha", "tau0", "demote_below", "target_bits"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int | float):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a number")
        for name in ("seed", "fallback", "tau_context", "patience", "dwell", "votes"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a whole number")
        if not isinstance(self.tiers, tuple | list) or not all(isinstance(bits, int) for bits in self.tiers):
            raise ConfigError(f"tiers={self.tiers!r} must be some of {', '.join(map(str, TIERS))}")
        kinds: tuple[tuple[str, type[StrEnum]], ...] = (
            ("canary", Canary), ("policy", Policy), ("tau_rule", TauRule), ("schedule", Schedule)
        )  # fmt: skip
        for name, kind in kinds:
            value = getattr(self, name)
            if not isinstance(value, str) or value not in set(kind):
                raise ConfigError(f"unknown {name} {value!r}; choose one of {', '.join(kind)}")
            object.__setattr__(self, name, kind(value))
        tiers = tuple(sorted(set(self.tiers)))
        if not tiers or not set(tiers) <= set(TIERS):
            raise ConfigError(f"tiers={self.tiers!r} must be some of {', '.join(map(str, TIERS))}")
        object.__setattr__(self, "tiers", tiers)
        if self.fallback not in TIERS:
            raise ConfigError(f"fallback={self.fallback!r} must be one of {', '.join(map(str, TIERS))}")
        for name in ("rate", "alpha", "demote_below"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be in (0, 1]")
        for name in ("tau0", "tau_context", "patience", "votes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be positive")
        if self.dwell < 0:
            raise ConfigError(f"dwell={self.dwell!r} must not be negative")
        if self.policy == Policy.ALLOCATE and not tiers[0] <= self.target_bits <= tiers[-1]:
            raise ConfigError(f"target_bits={self.target_bits!r} must be between {tiers[0]} and {tiers[-1]}")
