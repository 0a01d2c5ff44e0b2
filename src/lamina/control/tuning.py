"""What a tuned profile tells a controller: its settings, and the tiers to start with."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lamina.basis.tuning import Tuning
from lamina.codec import TIERS
from lamina.control.config import ControllerConfig, Policy
from lamina.control.policies import allocate, threshold
from lamina.errors import ConfigError

Pair = tuple[int, int]


def settings_of(tuning: Tuning) -> ControllerConfig:
    """Settings that tuning found; ConfigError if this version does not know them."""
    try:
        return ControllerConfig(**tuning.settings)
    except TypeError as error:
        raise ConfigError(f"the profile's controller settings are not known here ({error}); tune again") from error


def as_settings(config: ControllerConfig) -> dict[str, Any]:
    """Inverse of :func:`settings_of`: JSON values."""
    return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(config).items()}


def initial_tiers(config: ControllerConfig, drift: Sequence[Sequence[float]], sizes: Sequence[float]) -> list[Pair]:
    """Bits of K and V that a policy chooses for drift measured offline, before anything was measured live.

    Parameters
    ----------
    config : ControllerConfig
        Settings.
    drift : sequence
        As in :class:`Tuning`.
    sizes : sequence of float
        Elements of a token in each layer.
    """
    signals = [dict(zip(TIERS, row)) for row in (drift[::2] if config.tied else drift)]
    sides = 1 if config.tied else 2
    if config.policy == Policy.ALLOCATE:
        spread = [size for size in sizes for _ in range(sides)]
        flat = allocate(signals, spread, config.target_bits, config.tiers)
    else:
        flat = [threshold(signal, config.tau0, config.tiers, config.fallback) for signal in signals]
    return list(zip(flat[::sides], flat[sides - 1 :: sides]))
