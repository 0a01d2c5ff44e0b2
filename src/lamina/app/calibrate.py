"""What ``lamina calibrate`` does: text and a model in, a profile out."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from lamina.app.data import Source, calibration_sources, mixed_sequences
from lamina.app.loading import LoadedModel, load_config, load_model
from lamina.app.output import check_output
from lamina.app.screen import Screen
from lamina.app.values import parse_tier, tier_name
from lamina.basis.calibrate import MAX_CONTEXT, PROBE_TOKENS, CalibrationConfig, calibrate
from lamina.basis.geometry import ModelGeometry, model_geometry
from lamina.basis.profile import Profile
from lamina.basis.text import digest
from lamina.errors import ConfigError


@dataclass(frozen=True)
class CalibrationRequest:
    """What to calibrate, on what, and where the profile goes; fields are the options of ``lamina calibrate``."""

    model: str
    output: Path
    data: Sequence[str] = ("default",)
    field: str | None = None
    tokens: int = 40_000
    seq_len: int = 2048
    max_context: int | None = None
    seed: int = 0
    transform: str = "balanced"
    tier: str = "2"
    dtype: str = "auto"
    device: str = "auto"


@dataclass(frozen=True)
class CalibrationReport:
    """What was learnt, and what it took."""

    profile: str
    model: str
    data: list[str]
    tokens: int
    transform: str
    tier: str
    random_positions: bool
    max_position: int
    positions: str
    file_bytes: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The document that ``--json`` writes."""
        return asdict(self)


def run_calibration(request: CalibrationRequest, screen: Screen) -> CalibrationReport:
    """Calibrate, save the profile and report; every setting is checked before the weights are read."""
    settings = CalibrationConfig(
        transform=request.transform,
        max_context=request.max_context,
        tiers=parse_tier(request.tier),
        seed=request.seed,
    )
    check_lengths(model_geometry(load_config(request.model, screen)), settings, request.seq_len)
    check_output(request.output, "-o", "profile.safetensors")
    sources = calibration_sources(request.data, request.field)
    loaded = load_model(request.model, screen, dtype=request.dtype, device=request.device)
    start = time.perf_counter()
    profile = calibrate_on(
        loaded, sources, settings, seq_len=request.seq_len, tokens=request.tokens, seed=request.seed, screen=screen
    )
    seconds = time.perf_counter() - start
    try:
        profile.save(request.output)
    except OSError as error:
        raise ConfigError(f"cannot write {request.output}: {error}. Choose another file with -o.") from error
    if profile.info["tokens"] < request.tokens:
        screen.warn(f"The text holds only {profile.info['tokens']:,} of the {request.tokens:,} tokens asked for.")
    return CalibrationReport(
        profile=str(request.output),
        model=request.model,
        data=list(request.data),
        tokens=profile.info["tokens"],
        transform=profile.transform,
        tier=tier_name(settings.tiers),
        random_positions=profile.info["random_positions"],
        max_position=profile.info["max_position"],
        positions=describe_positions(profile, loaded.geometry, settings, request.seq_len),
        file_bytes=request.output.stat().st_size,
        seconds=seconds,
    )


def calibrate_on(
    loaded: LoadedModel,
    sources: Sequence[Source],
    settings: CalibrationConfig,
    *,
    seq_len: int,
    tokens: int,
    seed: int,
    screen: Screen,
) -> Profile:
    """Calibrate a loaded model on mixed sources, with a progress bar; the digest covers all their documents."""
    sequences = mixed_sequences(sources, loaded.tokenizer, seq_len=seq_len, tokens=tokens, seed=seed)
    total = -(-tokens // seq_len) * seq_len
    with screen.progress(f"Calibrating on {total:,} tokens", total) as done:
        return calibrate(
            loaded.model,
            sequences,
            settings,
            model_id=loaded.name,
            data_digest=digest(chain.from_iterable(source.documents for source in sources)),
            progress=done,
        )


def check_lengths(geometry: ModelGeometry, settings: CalibrationConfig, seq_len: int) -> None:
    """Raise ConfigError if sequences do not fit into the positions to calibrate for."""
    limit = _limit(geometry, settings)
    if seq_len > limit:
        raise ConfigError(
            f"sequences of {seq_len} tokens do not fit into {limit} positions (the model has "
            f"{geometry.max_positions}); lower --seq-len or raise --max-context"
        )


def describe_positions(profile: Profile, geometry: ModelGeometry, settings: CalibrationConfig, seq_len: int) -> str:
    """One sentence: which positions the statistics cover, and why."""
    limit = _limit(geometry, settings)
    if profile.info["random_positions"] and limit > seq_len:
        return f"random, up to {limit:,}: the model's hidden states depend on relative positions alone"
    if limit <= max(seq_len, PROBE_TOKENS):
        return f"0 to {limit:,}: a sequence fills all positions, so there is no room to move it"
    return f"0 to {seq_len:,}: the model's hidden states change with absolute position, so sequences were not moved"


def _limit(geometry: ModelGeometry, settings: CalibrationConfig) -> int:
    return min(geometry.max_positions, settings.max_context or MAX_CONTEXT)
