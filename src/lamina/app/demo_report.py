"""What goes into the demo's report besides the comparison: drift by layer, the environment, the command."""

import platform
import shlex
from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lamina import __version__
from lamina.app.loading import LoadedModel
from lamina.app.report.columns import Series
from lamina.app.report.page import Report
from lamina.basis.profile import Profile
from lamina.eval.arms import ARMS
from lamina.eval.layer_drift import QUERIES, layer_drift, record_rows

if TYPE_CHECKING:
    from lamina.app.demo import Comparison, DemoRequest

PACKAGES = ("torch", "transformers", "numba", "numpy")
DRIFT_ARMS = ("lamina-int2", "lamina-k4v2", "lamina-int4")


def demo_report(
    request: "DemoRequest",
    loaded: LoadedModel,
    profile: Profile,
    comparison: "Comparison",
    prompt_tokens: int,
    notes: Sequence[str],
) -> Report:
    """Measure the drift on the first sequence of the comparison, and put everything together."""
    ids = comparison.sequences[0]
    measured = sum(sequence.numel() for sequence in comparison.sequences)
    return Report(
        model=Path(loaded.name).name,
        title=comparison.title,
        rows=comparison.rows,
        drift=drift_series(loaded.model, profile, ids),
        drift_tokens=ids.numel(),
        drift_queries=min(QUERIES, ids.numel()),
        environment=[
            ("model", f"{Path(loaded.name).name}, {str(loaded.model.dtype).removeprefix('torch.')}"),
            ("configuration", loaded.geometry.config_hash),
            ("device", f"{device_name(loaded.model)}, {platform.system()} {platform.machine()}"),
            ("versions", f"lamina {__version__}, Python {platform.python_version()}, {_versions()}"),
            ("calibration", f"{profile.info.get('tokens', 0):,} tokens, transform {profile.transform}"),
            ("fidelity", f"{measured:,} tokens"),
            ("cache and speed", f"a prompt of {prompt_tokens:,} tokens"),
            ("date", datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")),
        ],
        notes=notes,
        command=command_line(request),
    )


def drift_series(model: PreTrainedModel, profile: Profile, ids: Tensor) -> list[Series]:
    """Drift of the Lamina arms over int64 ``[1, T]``, one series for all arms with the same key bits."""
    by_key_bits: dict[int, list[str]] = {}
    for name in DRIFT_ARMS:
        by_key_bits.setdefault(ARMS[name].tiers[0], []).append(name)
    rows = record_rows(model, ids)
    return [
        Series(f"{', '.join(names)} (keys at {bits} bits)", layer_drift(model, profile, ARMS[names[0]], rows))
        for bits, names in by_key_bits.items()
    ]


def command_line(request: "DemoRequest") -> str:
    """``lamina demo`` with the options of a request that are not the defaults."""
    words = ["lamina", "demo"]
    for field in fields(request):
        value = getattr(request, field.name)
        if value == field.default:
            continue
        option = "--" + field.name.replace("_", "-")
        if value is True:
            words.append(option)
        else:
            words += [word for one in (value if isinstance(value, tuple) else (value,)) for word in (option, str(one))]
    return shlex.join(words)


def device_name(model: PreTrainedModel) -> str:
    """The GPU's name, or the number of CPU threads."""
    return torch.cuda.get_device_name() if model.device.type == "cuda" else f"{torch.get_num_threads()} threads"


def _versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in PACKAGES)
