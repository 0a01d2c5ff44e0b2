"""What a user sets of Lamina in vLLM: ``--additional-config '{"lamina": {...}}'``."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.control.config import ControllerConfig
from lamina.engines.hf_settings import TUNED
from lamina.errors import ConfigError
from lamina.pages.config import WindowConfig

KEY = "lamina"
AUTO = "auto"


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine.

    Attributes
    ----------
    profile : str
        Path of the profile.
    arena_gb : float or "auto"
        GB (1e9 bytes) for planes beyond the base, a worker; ``auto``: as much as the profile's tiers can take.
    tiers : int, (int, int) or list, optional
        Bits of pages that close; default the profile's.
    sink, recent : int
        Exact windows, see :class:`lamina.WindowConfig`.
    controller : dict, "tuned" or None
        Fields of :class:`lamina.ControllerConfig`, or the settings in the profile; None keeps the tiers.
    controller_state : str or None
        File from which the controller's state is read at the start, if it is there, and to which it is written at the
        end.
    deterministic : bool
        Same output whatever shares the batch: tiers are fixed, no plane is shed.
    """

    profile: str
    arena_gb: float | str = AUTO
    tiers: Any = None
    sink: int = 64
    recent: int = 256
    controller: Any = None
    controller_state: str | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        """Check every field that needs no model."""
        if not isinstance(self.profile, str) or not self.profile:
            raise ConfigError(f"profile={self.profile!r} must be the path of a profile; see `lamina calibrate`")
        if not Path(self.profile).is_file():
            raise ConfigError(f"there is no profile at {self.profile}; make one with `lamina calibrate MODEL -o PATH`")
        gb = self.arena_gb
        if gb != AUTO and (isinstance(gb, bool) or not isinstance(gb, int | float) or not gb >= 0):
            raise ConfigError(f"arena_gb={gb!r} must be {AUTO!r} or a number of GB that is not negative")
        if not isinstance(self.deterministic, bool):
            raise ConfigError(f"deterministic={self.deterministic!r} must be true or false")
        if self.controller is not None and self.controller != TUNED and not isinstance(self.controller, dict):
            raise ConfigError(f"controller={self.controller!r} must be an object of settings, {TUNED!r} or null")
        if self.deterministic and self.controller is not None:
            raise ConfigError("deterministic fixes the tiers, which a controller changes; leave one of both out")
        if self.deterministic and gb != AUTO:
            raise ConfigError(
                f"deterministic sheds no plane, so the arena must hold all; leave arena_gb={gb!r} at {AUTO!r}"
            )
        if self.controller_state is not None and self.controller is None:
            raise ConfigError("controller_state needs a controller")
        object.__setattr__(self, "tiers", tiers_from_json(self.tiers))
        self.controller_settings()
        self.window()

    def window(self) -> WindowConfig:
        """The exact windows."""
        return WindowConfig(self.sink, self.recent, 0)

    def controller_settings(self) -> ControllerConfig | str | None:
        """The controller's settings."""
        if not isinstance(self.controller, dict):
            return self.controller
        return _build(ControllerConfig, self.controller, "controller")


def engine_config(additional: Any) -> EngineConfig | None:
    """Lamina's part of vLLM's ``additional_config``, None without one.

    Raises
    ------
    ConfigError
        Naming the field and the value that cannot be.
    """
    if not isinstance(additional, dict) or KEY not in additional:
        return None
    given = additional[KEY]
    if not isinstance(given, dict):
        raise ConfigError(f"additional_config[{KEY!r}] is {given!r}; give an object of settings with a profile")
    if "profile" not in given:
        raise ConfigError(f"additional_config[{KEY!r}] names no profile; see `lamina calibrate`")
    return _build(EngineConfig, given, KEY)


def decode_tokens(vllm_config: Any) -> int:
    """Query tokens of a request that decodes, drafts included."""
    speculative = vllm_config.speculative_config
    return 1 if speculative is None else 1 + speculative.num_speculative_tokens


def tiers_from_json(given: Any) -> Any:
    """Bits with pairs as tuples, which JSON does not know."""
    if not isinstance(given, list):
        return given
    pair = len(given) == 2 and all(isinstance(bits, int) for bits in given)
    return tuple(given) if pair else [tuple(x) if isinstance(x, list) else x for x in given]


def _build(kind: Any, given: dict[str, Any], what: str) -> Any:
    names = [f.name for f in dataclasses.fields(kind)]
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ConfigError(f"unknown {what} setting {unknown[0]!r}; the settings are {', '.join(names)}")
    return kind(**given)
