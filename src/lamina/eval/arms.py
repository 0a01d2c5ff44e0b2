"""The arms of an evaluation: every way of keeping a KV cache that Lamina compares, by name."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from lamina.basis.profile import Profile
from lamina.codec import CodecConfig, ScaleRule
from lamina.control.config import ControllerConfig, Policy
from lamina.control.tuning import settings_of
from lamina.engines.hf import LaminaCache
from lamina.errors import ConfigError
from lamina.eval.bf16 import Bf16Cache
from lamina.eval.echo import EchoCache, echo_controller
from lamina.eval.kivi import KiviCache
from lamina.pages import WindowConfig

LAMINA = CodecConfig()
PUBLISHED = CodecConfig(rule=ScaleRule.MINMAX, center=False, mass_correction=False)
OSCAR = CodecConfig(rule=ScaleRule.CLIP, center=False, mass_correction=False)


@dataclass(frozen=True)
class Arm:
    """One arm that is stored in a real packed cache.

    Attributes
    ----------
    name, what : str
        Name, and one line on what it is.
    tiers : (int, int)
        Bits of K and V.
    transform : str or None
        Basis; None means the profile's own.
    options : dict
        Further options of the transform.
    codec : CodecConfig
        How pages are written.
    """

    name: str
    what: str
    tiers: tuple[int, int]
    transform: str | None = None
    options: dict[str, bool] = field(default_factory=dict)
    codec: CodecConfig = LAMINA
    simulated: bool = False

    def profile(self, profile: Profile) -> Profile:
        """The profile that the arm reads and writes with."""
        return profile if self.transform is None else profile.with_transform(self.transform, **self.options)

    def cache(self, model: PreTrainedModel, profile: Profile, window: WindowConfig) -> Any:
        """An empty cache; ``profile`` is what :meth:`profile` returned."""
        return LaminaCache(model, profile, tiers=self.tiers, codec=self.codec, window=window)

    def open(self, model: PreTrainedModel, profile: Profile, window: WindowConfig) -> Callable[[], Any]:
        """What makes the empty cache of each request; live arms carry their controller from one to the next."""
        return lambda: self.cache(model, profile, window)


@dataclass(frozen=True)
class ExactArm(Arm):
    """Keys and values in bfloat16, as engines keep them."""

    def cache(self, model: PreTrainedModel, profile: Profile, window: WindowConfig) -> Any:
        """An empty cache."""
        return Bf16Cache(model)


@dataclass(frozen=True)
class KiviArm(Arm):
    """KIVI, simulated: quantised and dequantised rows, kept in full precision."""

    def cache(self, model: PreTrainedModel, profile: Profile, window: WindowConfig) -> Any:
        """An empty cache."""
        return KiviCache(model, profile, window)


@dataclass(frozen=True)
class LiveArm(Arm):
    """Lamina with a controller at work.

    Attributes
    ----------
    controller : ControllerConfig or None
        Its settings; None for those that ``lamina tune`` left in the profile.
    """

    controller: ControllerConfig | None = None

    def open(self, model: PreTrainedModel, profile: Profile, window: WindowConfig) -> Callable[[], Any]:
        """Caches that share a controller."""
        first = LaminaCache(model, profile, codec=self.codec, window=window, controller=self.settings(profile))
        live = first.controller
        return lambda: LaminaCache(model, profile, codec=self.codec, window=window, controller=live)

    def cache(self, model: PreTrainedModel, profile: Profile, window: WindowConfig) -> Any:
        """An empty cache with a controller of its own."""
        return self.open(model, profile, window)()

    def settings(self, profile: Profile) -> ControllerConfig:
        """The controller's settings, or ConfigError if the profile has none."""
        if self.controller is not None:
            return self.controller
        if profile.tuning is None:
            raise ConfigError(f"the arm {self.name} needs a tuned profile; run `lamina tune` first")
        return settings_of(profile.tuning)


@dataclass(frozen=True)
class EchoArm(Arm):
    """EchoKV, simulated: 16 bits until its first firing, then what its ring canary says."""

    def open(self, model: PreTrainedModel, profile: Profile, window: WindowConfig) -> Callable[[], Any]:
        """Caches that share a controller, without windows."""
        live = echo_controller(profile)
        return lambda: EchoCache(model, profile, live)

    def cache(self, model: PreTrainedModel, profile: Profile, window: WindowConfig) -> Any:
        """An empty cache with a controller of its own."""
        return EchoCache(model, profile)


def live(policy: str, **settings: Any) -> ControllerConfig:
    """Settings of a live arm."""
    return ControllerConfig(policy=Policy(policy), **settings)


ARMS = {
    arm.name: arm
    for arm in (
        ExactArm("bf16", "bfloat16 keys and values", (16, 16), "identity"),
        Arm("naive-int2", "per-token min/max, no rotation", (2, 2), "identity", codec=PUBLISHED),
        Arm("naive-int4", "per-token min/max, no rotation", (4, 4), "identity", codec=PUBLISHED),
        Arm("naive-int8", "per-token min/max, no rotation", (8, 8), "identity", codec=PUBLISHED),
        KiviArm("kivi-int2", "KIVI: K per channel over 32 tokens, V per token", (2, 2), "identity", simulated=True),
        Arm("hadamard-int2", "Hadamard rotation, min/max (QuaRot)", (2, 2), "hadamard", codec=PUBLISHED),
        Arm("hadamard-int4", "Hadamard rotation, min/max (QuaRot, Saw-INT4)", (4, 4), "hadamard", codec=PUBLISHED),
        Arm("oscar-int2", "OSCAR, one basis a layer, clipped", (2, 2), "oscar", {"per_head": False}, OSCAR),
        Arm("oscar-int2-head", "OSCAR, one basis a head, clipped", (2, 2), "oscar", {"per_head": True}, OSCAR),
        Arm("lamina-int2", "Lamina, K and V at 2 bits", (2, 2)),
        Arm("lamina-k4v2", "Lamina, K at 4 bits, V at 2", (4, 2)),
        Arm("lamina-k2v4", "Lamina, K at 2 bits, V at 4", (2, 4)),
        Arm("lamina-int4", "Lamina, K and V at 4 bits", (4, 4)),
        Arm("lamina-int8", "Lamina, K and V at 8 bits", (8, 8)),
        EchoArm("echokv", "EchoKV: ring canary, tied bits, 32-channel groups", (16, 16), "identity", simulated=True),
        LiveArm("lamina-live", "Lamina live, as `lamina tune` left it", (2, 2)),
        LiveArm(
            "lamina-live-2.5", "Lamina live, 2.5 bits on average", (2, 2), controller=live("allocate", target_bits=2.5)
        ),
        LiveArm(
            "lamina-live-3", "Lamina live, 3 bits on average", (2, 2), controller=live("allocate", target_bits=3.0)
        ),
    )
}


def parse_arms(names: str) -> list[Arm]:
    """Arms of a comma-separated list of names, ``all`` for every one, or ConfigError listing them."""
    wanted = [n.strip() for n in names.split(",") if n.strip()]
    if wanted == ["all"]:
        return list(ARMS.values())
    unknown = [n for n in wanted if n not in ARMS]
    if unknown or not wanted:
        raise ConfigError(f"unknown arm {', '.join(unknown) or '(none given)'}; choose from all, {', '.join(ARMS)}")
    return [ARMS[n] for n in dict.fromkeys(wanted)]


def check_arms(arms: list[Arm], profile: Profile) -> None:
    """Raise ConfigError if a live arm needs what the profile lacks."""
    for arm in arms:
        if isinstance(arm, LiveArm):
            arm.settings(profile)
