"""What ``lamina ablate`` and ``lamina stages`` do: studies of one thing at a time, and the error at four stages."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lamina.app.data import evaluation_source
from lamina.app.loading import LoadedModel, load_config, load_model
from lamina.app.output import check_output
from lamina.app.screen import Screen
from lamina.basis.geometry import model_geometry
from lamina.basis.profile import Profile
from lamina.basis.text import digest, token_sequences
from lamina.errors import ConfigError
from lamina.eval.ablation import Ablation, Study, StudyResult
from lamina.eval.arms import parse_arms
from lamina.eval.stages import STAGES, ArmStages, check_fixed, measure_stages
from lamina.eval.studies import CALIBRATION, calibration_study, parse_studies
from lamina.pages import WindowConfig

Row = dict[str, Any]

NO_GROUPS = "the model's heads cannot be cut into such groups"


@dataclass(frozen=True)
class TextRequest:
    """A model, its profile and text to measure on; fields are options of both commands."""

    model: str
    profile: Path
    text: str = "default"
    field: str | None = None
    tokens: int = 2048
    seq_len: int = 2048
    sink: int = 64
    recent: int = 256
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    csv: Path | None = None


@dataclass(frozen=True)
class AblationRequest(TextRequest):
    """Fields are the options of ``lamina ablate``."""

    studies: tuple[str, ...] = ()
    others: tuple[Path, ...] = ()


@dataclass(frozen=True)
class StagesRequest(TextRequest):
    """Fields are the options of ``lamina stages``."""

    arms: str = "oscar-int2,lamina-int2"


@dataclass(frozen=True)
class Measured:
    """What figures were taken on."""

    model: str
    profile: str
    text: str
    tokens: int
    seq_len: int
    window: WindowConfig

    def as_json(self) -> dict[str, Any]:
        """Its part of the document that ``--json`` writes."""
        plain = {name: x for name, x in vars(self).items() if name != "window"}
        return plain | {"sink": self.window.sink, "recent": self.window.recent}


@dataclass(frozen=True)
class AblationReport:
    """Figures of every study, and what was left out, with the reason."""

    on: Measured
    studies: list[StudyResult]
    left_out: list[str]

    def as_json(self) -> dict[str, Any]:
        """The document that ``--json`` writes."""
        studies = [
            {"study": s.study.name, "what": s.study.what, "note": s.study.note, "against": s.against}
            | {"arms": [asdict(f) for f in s.findings]}
            for s in self.studies
        ]
        return self.on.as_json() | {"left_out": self.left_out, "studies": studies}

    def rows(self) -> list[Row]:
        """One row an arm of a study."""
        return [
            {"study": s.study.name, "against": s.against} | asdict(f) | _where(self.on)
            for s in self.studies
            for f in s.findings
        ]


@dataclass(frozen=True)
class StagesReport:
    """Errors of every arm by layer and stage."""

    on: Measured
    arms: list[ArmStages]

    def as_json(self) -> dict[str, Any]:
        """The document that ``--json`` writes."""
        return self.on.as_json() | {
            "stages": list(STAGES),
            "arms": [
                {"arm": a.name, "simulated": a.simulated, "mean": asdict(a.mean)}
                | {"layers": [{"layer": i} | asdict(s) for i, s in enumerate(a.layers)]}
                for a in self.arms
            ],
        }

    def rows(self) -> list[Row]:
        """One row a layer of an arm, and one for their mean."""
        return [
            {"arm": a.name, "simulated": a.simulated, "layer": layer} | asdict(stages) | _where(self.on)
            for a in self.arms
            for layer, stages in [*enumerate(a.layers), ("mean", a.mean)]
        ]


def run_ablation(request: AblationRequest, screen: Screen) -> AblationReport:
    """Run studies; every setting is checked before the weights are read. The CSV grows study by study."""
    studies = parse_studies(request.studies)
    window, profile = _check(request, screen)
    studies, left_out = _runnable(studies, request, profile, screen)
    on, loaded, sequences = _read(request, window, profile, screen)
    run = Ablation(loaded.model, profile, sequences, window, request.seed)
    results = []
    for study in studies:
        what = f"Study {study.name} ({study.what}): {len(study.arms)} arms on {on.tokens:,} tokens"
        with screen.progress(what, on.tokens) as done:
            results.append(run.run(study, done))
        _write(AblationReport(on, results, []).rows(), request.csv)
    left_out += [f"{r.study.name} {'; '.join(r.left_out)}: {NO_GROUPS}" for r in results if r.left_out]
    return AblationReport(on, results, left_out)


def run_stages(request: StagesRequest, screen: Screen) -> StagesReport:
    """Measure errors at the four stages."""
    arms = parse_arms(request.arms)
    for arm in arms:
        check_fixed(arm)
    window, profile = _check(request, screen)
    on, loaded, sequences = _read(request, window, profile, screen)
    total = on.tokens * len(arms)
    with screen.progress(f"Measuring four stages of {len(arms)} arms on {on.tokens:,} tokens", total) as done:
        found = measure_stages(loaded.model, profile, arms, sequences, window=window, progress=done)
    report = StagesReport(on, found)
    _write(report.rows(), request.csv)
    return report


def _check(request: TextRequest, screen: Screen) -> tuple[WindowConfig, Profile]:
    window = WindowConfig(sink=request.sink, recent=request.recent)
    if request.csv is not None:
        check_output(request.csv, "--csv", "ablation.csv")
    profile = Profile.load(request.profile)
    geometry = model_geometry(load_config(request.model, screen))
    profile.check_model(geometry)
    if request.seq_len > geometry.max_positions:
        raise ConfigError(
            f"sequences of {request.seq_len} tokens exceed the model's {geometry.max_positions} positions; "
            "lower --seq-len"
        )
    return window, profile


def _runnable(
    studies: list[Study], request: AblationRequest, profile: Profile, screen: Screen
) -> tuple[list[Study], list[str]]:
    """The studies with the arms that the request gives, and why others are left out."""
    if any(layer.moments is None for layer in profile.packed.values()):
        raise ConfigError(f"{request.profile} has no moments to make other bases of; make one with `lamina calibrate`")
    if CALIBRATION in request.studies and not request.others:
        raise ConfigError(
            f"the study {CALIBRATION} compares profiles; calibrate others on other text or fewer tokens, and give each "
            "with --other-profile"
        )
    ready, left_out = [], []
    for study in studies:
        if study.name == CALIBRATION:
            if request.others:
                ready.append(calibration_study(_profiles(request, profile, screen)))
            else:
                left_out.append(f"{CALIBRATION}: it compares the profile with others, given with --other-profile")
        elif any(arm.fits(profile) for arm in study.arms):
            ready.append(study)
        else:
            left_out.append(f"{study.name}: {NO_GROUPS}")
    if not ready:
        raise ConfigError(f"nothing to run; left out: {'; '.join(left_out)}")
    return ready, left_out


def _profiles(request: AblationRequest, profile: Profile, screen: Screen) -> list[tuple[str, Profile]]:
    """The run's profile and the others, by the names of their files."""
    geometry = model_geometry(load_config(request.model, screen))
    named = [(path.stem, path) for path in (request.profile, *request.others)]
    if len({name for name, _ in named}) < len(named):
        raise ConfigError(f"profiles are told apart by name; {', '.join(n for n, _ in named)} has one twice")
    profiles = [(named[0][0], profile)]
    for name, path in named[1:]:
        other = Profile.load(path)
        other.check_model(geometry)
        profiles.append((name, other))
    return profiles


def _read(
    request: TextRequest, window: WindowConfig, profile: Profile, screen: Screen
) -> tuple[Measured, LoadedModel, list[Tensor]]:
    """The model and the text's sequences."""
    source = evaluation_source(request.text, request.field)
    if digest(source.documents) == profile.info.get("data_digest"):
        screen.warn(f"The profile was calibrated on {source.name} itself: these figures flatter it. Use other text.")
    loaded = load_model(request.model, screen, dtype=request.dtype, device=request.device, profile=profile)
    length = min(request.seq_len, request.tokens)
    sequences = list(
        token_sequences(
            source.documents, loaded.tokenizer, seq_len=length, max_tokens=request.tokens, seed=request.seed
        )
    )
    tokens = length * len(sequences)
    return (
        Measured(request.model, str(request.profile), request.text, tokens, length, window), loaded, sequences
    )  # fmt: skip


def _where(on: Measured) -> Row:
    return {"text": Path(on.text).name, "tokens": on.tokens, "sink": on.window.sink, "recent": on.window.recent}


def _write(rows: Sequence[Row], path: Path | None) -> None:
    """Write rows that all have the same columns as CSV, if there is a file to write."""
    if path is None:
        return
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows({name: _plain(x) for name, x in row.items()} for row in rows)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}. Choose another file with --csv.") from error


def _plain(value: Any) -> Any:
    """A float in six digits, and none where there is no figure."""
    return ("" if value != value else f"{value:.6g}") if isinstance(value, float) else value
