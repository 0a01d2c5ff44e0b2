"""What a cache is told and what it reads of its model, checked."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from lamina.basis.calibrate import decoder_of
from lamina.basis.geometry import ModelGeometry
from lamina.basis.profile import Profile
from lamina.codec.page import check_tier
from lamina.control.config import Canary, ControllerConfig
from lamina.control.live import RING_TOKENS
from lamina.control.state import Controller
from lamina.control.tuning import initial_tiers, settings_of
from lamina.errors import ConfigError
from lamina.pages import WindowConfig

Tiers = int | tuple[int, int] | Sequence[tuple[int, int]] | None
"""Bits of K and V: one number, a pair, a pair a layer, or the profile's."""


TUNED = "tuned"
"""Stands for the controller settings in a tuned profile."""


def parse_tiers(tiers: Tiers, default: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """One checked pair of bits a layer, of which there are as many as by default."""
    n = len(default)
    given: Any = default if tiers is None else tiers
    if isinstance(given, int):
        given = (given, given)
    if isinstance(given, tuple) and len(given) == 2 and all(isinstance(bits, int) for bits in given):
        given = [given] * n
    if (
        not isinstance(given, list | tuple)
        or len(given) != n
        or any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in given)
    ):
        raise ConfigError(f"tiers {tiers!r} must be one number, a pair (K, V), or {n} pairs, one a layer")
    for i, pair in enumerate(given):
        for side, bits in zip("KV", pair):
            check_tier(bits, f"the {side} tier of layer {i}")
    return [(int(k), int(v)) for k, v in given]


def make_controller(
    given: Controller | ControllerConfig | str | None,
    tiers: list[tuple[int, int]] | None,
    geometry: ModelGeometry,
    profile: Profile,
) -> Controller | None:
    """The controller that was given, or a new one for these settings, checked against the model.

    A new one starts with ``tiers``; if they are None, with those that its policy chooses for the drift that tuning
    measured offline, or with the profile's.
    """
    if given is None:
        return None
    if given == TUNED:
        if profile.tuning is None:
            raise ConfigError(f"controller={TUNED!r} needs a profile that `lamina tune` made; tune it first")
        given = settings_of(profile.tuning)
    packed = geometry.packed
    if isinstance(given, ControllerConfig):
        sizes, tuning = [float(g.n_kv_heads * g.head_dim) for g in packed.values()], profile.tuning
        first = [(tiers or profile.tiers)[i] for i in packed]
        if tiers is None and tuning is not None and given.canary == Canary.ANCHORED:
            first = initial_tiers(given, tuning.drift, sizes)
        return Controller(given, first, sizes, weights=tuning.weights if tuning else None)
    if not isinstance(given, Controller):
        raise ConfigError(
            f"controller is {given!r}; give a ControllerConfig, {TUNED!r}, or the Controller of an earlier cache"
        )
    if len(given.tiers) != len(packed):
        raise ConfigError(f"the controller has {len(given.tiers)} layers, the model {len(packed)} with full attention")
    return given


def check_canary(controller: Controller | None, window: WindowConfig) -> None:
    """Raise ConfigError if the exact windows do not hold the keys that the ring canary looks at."""
    kept = window.recent + window.rollback
    if controller is not None and controller.config.canary == Canary.RING and kept < RING_TOKENS:
        raise ConfigError(
            f"the ring canary needs the last {RING_TOKENS} keys exactly, but recent + rollback keep {kept} tokens"
        )


def layer_scaling(model: PreTrainedModel, head_dims: list[int]) -> list[float]:
    """Factor on q.k of every layer, read from the attention modules."""
    found = [dim**-0.5 for dim in head_dims]
    for module in decoder_of(model).modules():
        index, scaling = getattr(module, "layer_idx", None), getattr(module, "scaling", None)
        if isinstance(index, int) and index < len(found) and isinstance(scaling, float):
            found[index] = scaling
    return found
