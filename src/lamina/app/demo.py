"""What ``lamina demo`` does: calibrate once, write a long answer at 2 bits, compare the ways of keeping the cache."""

import hashlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from lamina import __version__
from lamina.app.calibrate import calibrate_on
from lamina.app.data import HELD_OUT_EVERY, Source, read_sources, split
from lamina.app.demo_prompt import built_in_prompt
from lamina.app.demo_report import demo_report, device_name
from lamina.app.generate import (
    Sampling,
    check_room,
    encode_prompt,
    generate_text,
    read_prompt,
    report_on,
)
from lamina.app.loading import LoadedModel, load_model
from lamina.app.output import check_output
from lamina.app.plan import sequence_bytes
from lamina.app.report.page import write_report
from lamina.app.screen import Screen
from lamina.app.small_model import default_cache_dir, fetch_small_model
from lamina.app.speed import UNTIMED_STEPS, decode_speeds
from lamina.app.tables import demo_table
from lamina.app.values import format_bytes
from lamina.basis.calibrate import CalibrationConfig
from lamina.basis.geometry import ModelGeometry
from lamina.basis.profile import Profile
from lamina.basis.text import digest, token_sequences
from lamina.engines.hf import LaminaCache, cache_kwarg
from lamina.errors import ConfigError, ProfileError
from lamina.eval.arms import ARMS, Arm
from lamina.eval.fidelity import ArmResult, measure_fidelity
from lamina.pages import WindowConfig

DEMO_ARMS = ("bf16", "naive-int2", "oscar-int2", "lamina-int2", "lamina-k4v2", "lamina-int4")
REPORT = Path("lamina-demo.html")


@dataclass(frozen=True)
class Effort:
    """How much of everything: tokens, and the length of a sequence."""

    calibration: int
    fidelity: int
    seq_len: int
    answer: int
    timed: int


FULL = Effort(calibration=32_768, fidelity=2048, seq_len=2048, answer=400, timed=32)
QUICK = Effort(calibration=12_000, fidelity=1024, seq_len=1024, answer=96, timed=16)


@dataclass(frozen=True)
class DemoRequest:
    """What to show; fields are the options of ``lamina demo``."""

    model: str | None = None
    prompt_file: Path | None = None
    max_new_tokens: int | None = None
    data: tuple[str, ...] = ("default",)
    field: str | None = None
    quick: bool = False
    report: Path = REPORT


@dataclass(frozen=True)
class DemoRow:
    """One arm of the comparison; bytes are of the cache after prompt and timed tokens."""

    name: str
    bits: float
    kv_bytes: int
    kv_bytes_bf16: int
    kl_mean: float
    top1: float
    tokens_per_second: float
    bytes_by_kind: dict[str, int]


@dataclass(frozen=True)
class Comparison:
    """All arms, what their figures are of, and the sequences that fidelity was measured on."""

    title: str
    rows: list[DemoRow]
    sequences: list[Tensor]


def run_demo(request: DemoRequest, screen: Screen) -> list[DemoRow]:
    """Run the whole demo, telling what happens on the screen."""
    start = time.perf_counter()
    check_output(request.report, "--report", REPORT.name)
    effort = QUICK if request.quick else FULL
    kept, held = zip(*map(split, read_sources(request.data, request.field)))
    loaded = load_model(_demo_model(request.model, screen), screen)
    seq_len = min(effort.seq_len, loaded.geometry.max_positions)
    answer_tokens = request.max_new_tokens or effort.answer
    ids = _prompt_ids(loaded, request.prompt_file)
    check_room(loaded, ids, max(answer_tokens, effort.timed))
    profile, path = _demo_profile(loaded, kept, effort.calibration, seq_len, screen)
    _answer(loaded, profile, ids, answer_tokens, screen)
    comparison = _compare(loaded, profile, ids, held, effort, seq_len, screen)
    notes = _notes(loaded, held)
    screen.show(*notes, f"\nThe profile is {path}. To use it in Python:\n")
    screen.show(*(f"    {line}" for line in python_lines(loaded, path)))
    with screen.working("Measuring the drift of each layer"):
        report = demo_report(request, loaded, profile, comparison, ids.shape[1], notes)
    write_report(report, request.report)
    screen.show(f"\nThe demo took {time.perf_counter() - start:.0f} s. Its figures as pictures: {request.report}")
    return comparison.rows


def python_lines(loaded: LoadedModel, path: Path) -> list[str]:
    """Three lines of Python that generate with a profile, given ``model`` and tokenised ``inputs``."""
    (keyword,) = cache_kwarg(loaded.model, DynamicCache())
    return [
        "from lamina import LaminaCache, Profile",
        f"cache = LaminaCache(model, Profile.load({str(path)!r}))",
        f"model.generate(**inputs, max_new_tokens=200, {keyword}=cache)",
    ]


def _demo_model(name: str | None, screen: Screen) -> str:
    if name is not None:
        return name
    with screen.working("Looking for the small model"):
        return str(fetch_small_model(default_cache_dir(), progress=screen.remark))


def _prompt_ids(loaded: LoadedModel, prompt_file: Path | None) -> Tensor:
    if prompt_file is not None:
        return encode_prompt(loaded, read_prompt(None, prompt_file), chat=None)
    prompt = built_in_prompt(lambda text: encode_prompt(loaded, text, chat=None).shape[1])
    return encode_prompt(loaded, prompt, chat=None)


def _demo_profile(
    loaded: LoadedModel, sources: Sequence[Source], tokens: int, seq_len: int, screen: Screen
) -> tuple[Profile, Path]:
    """Profile from the cache folder, or a new one that is put there for the next time."""
    path = profile_path(loaded, sources, tokens, seq_len)
    if path.is_file():
        try:
            profile = Profile.load(path)
            profile.check_model(loaded.geometry)
            screen.remark(f"Using the profile of an earlier demo, {path}")
            return profile, path
        except ProfileError as error:
            screen.warn(f"Calibrating again: {error}")
    profile = calibrate_on(loaded, sources, CalibrationConfig(), seq_len=seq_len, tokens=tokens, seed=0, screen=screen)
    try:
        profile.save(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error}. Set XDG_CACHE_HOME to a folder that can be written."
        ) from error
    return profile, path


def profile_path(loaded: LoadedModel, sources: Sequence[Source], tokens: int, seq_len: int) -> Path:
    """Where the demo keeps its profile of this model, configuration, package version, text and length."""
    folder = Path(loaded.name)
    identity: list[Any] = [str(folder.resolve()) if folder.is_dir() else loaded.name, tokens, seq_len]
    identity.append(digest(document for source in sources for document in source.documents))
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name)
    file = f"{name}-{loaded.geometry.config_hash}-{__version__}-{key}.safetensors"
    return default_cache_dir() / "profiles" / file


def _answer(loaded: LoadedModel, profile: Profile, ids: Tensor, tokens: int, screen: Screen) -> None:
    screen.show(f"\nlamina-int2 answers a prompt of {ids.shape[1]:,} tokens:\n")
    cache = LaminaCache(loaded.model, profile, tiers=2)
    sampling = Sampling(temperature=0.5, top_p=0.9, seed=0)
    done = generate_text(
        loaded, ids, cache, max_new_tokens=tokens, sampling=sampling, on_text=screen.write, screen=screen
    )
    screen.write("\n")
    summary = report_on(done, cache, loaded).summary()
    screen.show(f"\n{summary}.\nWhat the 2 bits change is measured next, against the exact run.\n")


def _compare(
    loaded: LoadedModel,
    profile: Profile,
    ids: Tensor,
    held: Sequence[Source],
    effort: Effort,
    seq_len: int,
    screen: Screen,
) -> Comparison:
    arms = [ARMS[name] for name in DEMO_ARMS]
    documents = [document for source in held for document in source.documents]
    sequences = list(
        token_sequences(documents, loaded.tokenizer, seq_len=seq_len, max_tokens=max(effort.fidelity, seq_len), seed=0)
    )
    tokens = len(sequences) * seq_len
    with screen.progress(f"Measuring {len(arms)} arms on {tokens:,} tokens", tokens) as done:
        results = measure_fidelity(loaded.model, profile, arms, sequences, progress=done)
    profiles = {arm.name: arm.profile(profile) for arm in arms}
    caches = {arm.name: _cache(loaded, profiles[arm.name], arm) for arm in arms}
    total = len(arms) * (1 + UNTIMED_STEPS + effort.timed)
    with screen.progress(f"Timing {len(arms)} arms on {effort.timed} tokens after the prompt", total) as done:
        speeds = decode_speeds(loaded, ids, caches, effort.timed, done)
    length = caches["bf16"].get_seq_length()
    rows = [_row(result, speeds[result.name], caches[result.name], loaded.geometry, length) for result in results]
    where = device_name(loaded.model)
    title = (
        f"{Path(loaded.name).name}: cache and speed at {length:,} tokens ({where}), KL and top-1 against the exact run "
        f"over {tokens:,} other tokens"
    )
    screen.show(demo_table(title, rows))
    return Comparison(title, rows, sequences)


def _cache(loaded: LoadedModel, profile: Profile, arm: Arm) -> Any:
    """A cache to time; the bf16 arm is transformers' own."""
    if arm.name == "bf16":
        return DynamicCache(config=loaded.model.config)
    return arm.cache(loaded.model, profile, WindowConfig())


def _row(result: ArmResult, speed: float, cache: Any, geometry: ModelGeometry, length: int) -> DemoRow:
    bf16 = 2 * (geometry.elements(length) + geometry.window_elements(length))
    by_kind = cache.memory() if isinstance(cache, LaminaCache) else {"rows": bf16}
    return DemoRow(
        name=result.name,
        bits=result.bits_history,
        kv_bytes=sum(by_kind.values()),
        kv_bytes_bf16=bf16,
        kl_mean=result.kl_mean,
        top1=result.top1,
        tokens_per_second=speed,
        bytes_by_kind=by_kind,
    )


def _notes(loaded: LoadedModel, held: Sequence[Source]) -> list[str]:
    """What the figures mean."""
    g, window = loaded.geometry, WindowConfig()
    exact = window.sink + window.recent + window.rollback
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    limit = g.max_positions
    packed = sequence_bytes(g, [(2, 2)], limit, torch.bfloat16, window)
    plain = 2 * (g.elements(limit) + g.window_elements(limit))
    names = ", ".join(source.name for source in held)
    return [
        f"Lamina's caches keep the first {window.sink} and the last {window.recent} to {exact} tokens exactly, here in "
        f"{dtype}, the dtype the model runs in. Their share falls with length: in bfloat16 and at the model's "
        f"{limit:,} tokens, lamina-int2 takes {format_bytes(packed)} against "
        f"{format_bytes(plain)} ({packed / plain:.0%}).",
        f"bf16 is measured with keys and values rounded to bfloat16; its speed is that of transformers' DynamicCache "
        f"in {dtype}. Steps are timed in turn, and the median step counts.",
        f"KL and top-1 are of every {HELD_OUT_EVERY}th document of the text ({names}), which calibration did not see.",
    ]
