"""Lamina: a KV cache for transformer inference whose precision is decided while the model runs.

Examples
--------
A profile is made once a model and kept in a file; every generation takes a fresh cache.

>>> from lamina import LaminaCache, Profile
>>> cache = LaminaCache(model, Profile.load("model.profile"), tiers=(4, 2))
>>> output = model.generate(**inputs, max_new_tokens=5, cache=cache)
>>> sorted(cache.memory())
['centers', 'codes', 'page_tables', 'scales', 'windows']
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lamina.basis.absorb import absorb_value_basis as absorb_value_basis
    from lamina.basis.calibrate import CalibrationConfig as CalibrationConfig
    from lamina.basis.calibrate import calibrate as calibrate
    from lamina.basis.profile import Profile as Profile
    from lamina.codec import CodecConfig as CodecConfig
    from lamina.control.config import ControllerConfig as ControllerConfig
    from lamina.control.state import Controller as Controller
    from lamina.control.trace import Trace as Trace
    from lamina.engines.hf import LaminaCache as LaminaCache
    from lamina.engines.hf_graph import DecodeGraph as DecodeGraph
    from lamina.pages import WindowConfig as WindowConfig

_EXPORTS = {
    "CalibrationConfig": "lamina.basis.calibrate",
    "CodecConfig": "lamina.codec",
    "Controller": "lamina.control.state",
    "ControllerConfig": "lamina.control.config",
    "DecodeGraph": "lamina.engines.hf_graph",
    "LaminaCache": "lamina.engines.hf",
    "Profile": "lamina.basis.profile",
    "Trace": "lamina.control.trace",
    "WindowConfig": "lamina.pages",
    "absorb_value_basis": "lamina.basis.absorb",
    "calibrate": "lamina.basis.calibrate",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that ``import lamina`` and the command line stay fast."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'lamina' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
