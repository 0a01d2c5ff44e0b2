"""What ``lamina tune`` does: weights and controller settings for a goal, written into a profile."""

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lamina.app.data import Source, evaluation_source
from lamina.app.loading import LoadedModel, load_config, load_model
from lamina.app.output import check_output
from lamina.app.screen import Screen
from lamina.basis.geometry import model_geometry
from lamina.basis.profile import Profile
from lamina.basis.text import digest, token_sequences
from lamina.basis.tuning import Tuning
from lamina.codec import PAGE_TOKENS, TIERS
from lamina.control.config import ControllerConfig, Policy
from lamina.control.tuning import settings_of
from lamina.errors import ConfigError
from lamina.eval.fidelity import ArmResult, measure_fidelity
from lamina.eval.tuning import LIVE, measure_weights, tune_to_bits, tune_to_kl
from lamina.pages import WindowConfig


@dataclass(frozen=True)
class TuneRequest:
    """The goal, and what to measure on; fields are the options of ``lamina tune``."""

    model: str
    profile: Path
    output: Path
    max_kl: float | None = None
    target_bits: float | None = None
    policy: str = "threshold"
    data: tuple[str, ...] = ("default",)
    field: str | None = None
    tokens: int = 2048
    seq_len: int = 1024
    remeasure: bool = False
    sink: int = 64
    recent: int = 256
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0


@dataclass(frozen=True)
class TuneReport:
    """Settings that were found, and what a run with them showed on each text."""

    profile: str
    model: str
    goal: str
    controller: ControllerConfig
    tiers: list[tuple[int, int]]
    texts: list[tuple[str, ArmResult]]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The document that ``--json`` writes."""
        return {
            "profile": self.profile,
            "model": self.model,
            "goal": self.goal,
            "policy": str(self.controller.policy),
            "tau0": self.controller.tau0,
            "target_bits": self.controller.target_bits,
            "tiers": self.tiers,
            "texts": [
                {"text": name, "kl_mean": r.kl_mean, "tier_mean": r.tier_mean, "bits_history": r.bits_history}
                for name, r in self.texts
            ],
            "seconds": self.seconds,
        }


def run_tuning(request: TuneRequest, screen: Screen) -> TuneReport:
    """Measure what is missing, look for the settings, and write the profile."""
    goal = check_goal(request)
    window = WindowConfig(sink=request.sink, recent=request.recent)
    least = request.sink + request.recent + 6 * PAGE_TOKENS
    if request.seq_len < least:
        raise ConfigError(
            f"sequences of {request.seq_len} tokens hardly leave the exact windows of {request.sink} and "
            f"{request.recent}; raise --seq-len to {least} or more"
        )
    check_output(request.output, "-o", "tuned.profile")
    profile = Profile.load(request.profile)
    limit = model_geometry(load_config(request.model, screen)).max_positions
    if request.seq_len > limit:
        raise ConfigError(
            f"sequences of {request.seq_len} tokens exceed the model's {limit} positions; lower --seq-len"
        )
    sources = [evaluation_source(name, request.field) for name in request.data]
    for source in sources:
        if digest(source.documents) == profile.info.get("data_digest"):
            screen.warn(
                f"The profile was calibrated on {source.name} itself: tuning will be too hopeful. Use other text."
            )
    loaded = load_model(request.model, screen, dtype=request.dtype, device=request.device, profile=profile)
    start = time.perf_counter()
    texts = [_sequences(source, loaded, request) for source in sources]
    if profile.tuning is None or request.remeasure:
        with _Bars(screen) as bars:
            weights, drift = measure_weights(
                loaded.model, profile, [s for text in texts for s in text], window=window, progress=bars
            )
        profile = replace(profile, tuning=Tuning(weights, drift))
    if request.target_bits is not None:
        profile = tune_to_bits(profile, request.target_bits)
        results = []
        for source, text in zip(sources, texts):
            with screen.progress(f"Checking on {source.name}", sum(s.numel() for s in text)) as done:
                results += measure_fidelity(loaded.model, profile, [LIVE], text, window=window, progress=done)
    else:
        assert request.max_kl is not None
        with _Bars(screen) as bars:
            profile, results = tune_to_kl(
                loaded.model,
                profile,
                texts,
                request.max_kl,
                policy=Policy(request.policy),
                window=window,
                progress=bars,
            )
    assert profile.tuning is not None
    shown = [(source.name, r) for source, r in zip(sources, results)]
    measured = {
        "goal": goal,
        "texts": [{"text": name, "kl_mean": r.kl_mean, "tier_mean": r.tier_mean} for name, r in shown],
        "tokens": sum(s.numel() for text in texts for s in text),
        "data_digest": digest(d for source in sources for d in source.documents),
    }
    profile = replace(profile, tuning=replace(profile.tuning, measured=measured))
    try:
        profile.save(request.output)
    except OSError as error:
        raise ConfigError(f"cannot write {request.output}: {error}. Choose another file with -o.") from error
    tiers = [profile.tiers[i] for i in profile.packed]
    seconds = time.perf_counter() - start
    controller = settings_of(profile.tuning)  # type: ignore[arg-type]
    return TuneReport(str(request.output), request.model, goal, controller, tiers, shown, seconds)


def check_goal(request: TuneRequest) -> str:
    """The goal in words, or ConfigError if there is none, two, or one that makes no sense."""
    if (request.max_kl is None) == (request.target_bits is None):
        raise ConfigError("give one goal: --max-kl NATS, or --target-bits BITS")
    if request.target_bits is not None:
        if not TIERS[0] <= request.target_bits <= TIERS[-1]:
            raise ConfigError(f"--target-bits {request.target_bits:g} must be between {TIERS[0]} and {TIERS[-1]}")
        if request.policy != "threshold":
            raise ConfigError("--policy goes with --max-kl; --target-bits spends its bits by `allocate`")
        return f"{request.target_bits:g} bits on average"
    assert request.max_kl is not None
    if not 0 < request.max_kl < float("inf"):
        raise ConfigError(f"--max-kl {request.max_kl:g} must be a positive number of nats, such as 0.01")
    known = [str(p) for p in Policy if p != Policy.ALLOCATE]
    if request.policy not in known:
        raise ConfigError(f"unknown policy {request.policy!r}; choose one of {', '.join(known)}")
    return f"mean KL up to {request.max_kl:g} nats"


def _sequences(source: Source, loaded: LoadedModel, request: TuneRequest) -> list[Tensor]:
    share = max(request.seq_len, request.tokens // len(request.data))
    return list(
        token_sequences(
            source.documents, loaded.tokenizer, seq_len=request.seq_len, max_tokens=share, seed=request.seed
        )
    )


class _Bars:
    """One progress bar after the other, each for as long as its name stays the same."""

    def __init__(self, screen: Screen) -> None:
        self.screen, self.what = screen, ""
        self.open = ExitStack()
        self.update: Any = None

    def __enter__(self) -> "_Bars":
        return self

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self.what:
            self.open.close()
            self.what, self.update = what, self.open.enter_context(self.screen.progress(what, total))
        self.update(done)

    def __exit__(self, *_: object) -> None:
        self.open.close()
