"""What ``lamina fidelity`` does: how far each arm is from the exact run, on text of the user's choice."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.app.data import Source, evaluation_source
from lamina.app.loading import load_config, load_model
from lamina.app.screen import Screen
from lamina.app.values import parse_position
from lamina.basis.geometry import model_geometry
from lamina.basis.profile import Profile
from lamina.basis.text import digest, token_sequences
from lamina.errors import ConfigError
from lamina.eval.arms import Arm, check_arms, parse_arms
from lamina.eval.fidelity import ArmResult, as_json, measure_fidelity
from lamina.pages import WindowConfig


@dataclass(frozen=True)
class FidelityRequest:
    """What to compare, on what; fields are the options of ``lamina fidelity``."""

    model: str
    profile: Path
    arms: str
    text: str = "default"
    field: str | None = None
    seq_len: int = 2048
    max_tokens: int = 4096
    position_offset: str = "0"
    sink: int = 64
    recent: int = 256
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    layers: bool = True


@dataclass(frozen=True)
class FidelityReport:
    """Figures of every arm, and what they were taken on."""

    model: str
    text: str
    tokens: int
    seq_len: int
    position_offset: int
    max_positions: int
    arms: list[ArmResult]

    def as_json(self) -> dict[str, Any]:
        """The document that ``--json`` writes."""
        return as_json(self.model, self.text, self.tokens, self.arms)


@dataclass(frozen=True)
class Checked:
    """A request that can be run."""

    arms: list[Arm]
    window: WindowConfig
    profile: Profile
    offset: int
    limit: int
    source: Source


def check_fidelity(request: FidelityRequest, screen: Screen | None = None) -> Checked:
    """Check every setting that can be checked without the weights."""
    arms = parse_arms(request.arms)
    window = WindowConfig(sink=request.sink, recent=request.recent)
    profile = Profile.load(request.profile)
    check_arms(arms, profile)
    limit = model_geometry(load_config(request.model, screen or Screen())).max_positions
    offset = parse_position(request.position_offset, limit)
    if offset + request.seq_len > limit:
        raise ConfigError(
            f"sequences of {request.seq_len} tokens from position {offset} on exceed the model's {limit} positions; "
            f"lower --position-offset or --seq-len"
        )
    return Checked(arms, window, profile, offset, limit, evaluation_source(request.text, request.field))


def run_fidelity(request: FidelityRequest, screen: Screen) -> FidelityReport:
    """Measure; every setting is checked before the weights are read."""
    checked = check_fidelity(request, screen)
    arms, profile, source, offset = checked.arms, checked.profile, checked.source, checked.offset
    if digest(source.documents) == profile.info.get("data_digest"):
        screen.warn(f"The profile was calibrated on {source.name} itself: these figures flatter it. Use other text.")
    loaded = load_model(request.model, screen, dtype=request.dtype, device=request.device, profile=profile)
    sequences = list(
        token_sequences(
            source.documents,
            loaded.tokenizer,
            seq_len=request.seq_len,
            max_tokens=request.max_tokens,
            seed=request.seed,
        )
    )
    tokens = len(sequences) * request.seq_len
    with screen.progress(f"Measuring {len(arms)} arms on {tokens:,} tokens", tokens) as done:
        results = measure_fidelity(
            loaded.model,
            profile,
            arms,
            sequences,
            position_offset=offset,
            window=checked.window,
            by_layer=request.layers,
            progress=done,
        )
    return FidelityReport(request.model, request.text, tokens, request.seq_len, offset, checked.limit, results)
