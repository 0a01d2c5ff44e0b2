"""A tiny Llama with a byte-level tokenizer in a folder, and its profile; nothing is downloaded."""

import io
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lamina import ControllerConfig, LaminaCache, Trace, WindowConfig, cli
from lamina.app.watch import Watch
from lamina.basis.calibrate import CalibrationConfig, calibrate
from lamina.engines.hf import cache_kwarg
from tiny_llama import make_model, make_tokenizer, save_tiny


@dataclass(frozen=True)
class Tiny:
    """Folder of the model and file of its profile."""

    model: str
    profile: str


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder / "model", folder / "tiny.safetensors", config=CalibrationConfig(tiers=(4, 2)))
    return Tiny(str(folder / "model"), str(folder / "tiny.safetensors"))


@pytest.fixture(scope="session")
def other(tmp_path_factory) -> Tiny:
    """A model that the tiny profile does not fit, without a chat template."""
    folder = tmp_path_factory.mktemp("other")
    make_model(layers=1, positions=128).save_pretrained(folder)
    make_tokenizer(None).save_pretrained(folder)
    return Tiny(str(folder), "")


@pytest.fixture
def lamina():
    """Run a command, as its options would be typed."""

    def run(*args: object, stdin: str | None = None):
        return CliRunner().invoke(cli.app, [str(a) for a in args], input=stdin, env={"COLUMNS": "200"})

    return run


@pytest.fixture
def refused(lamina):
    """Run a command that must fail with a message that holds certain words, and leave stdout empty."""

    def run(*args: object, words: str, stdin: str | None = None) -> None:
        result = lamina(*args, stdin=stdin)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        last = result.stderr.splitlines()[-1]
        assert last.startswith("Error: ")
        assert all(word in last for word in words.split()), last

    return run


@pytest.fixture
def text_file(tmp_path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"Paragraph {i} says {i * i} and then no more." for i in range(600)))
    return file


@dataclass(frozen=True)
class Traced:
    """A run that was traced and watched: its trace, its cache, and what the watch wrote."""

    file: Path
    cache: LaminaCache
    watched: str


@pytest.fixture(scope="session")
def traced(tmp_path_factory) -> Traced:
    """Eight bits at first, a firing every 16 steps that goes for three, and a limit that makes planes go."""
    file = tmp_path_factory.mktemp("traced") / "run.jsonl"
    model, random = make_model(), torch.Generator().manual_seed(1)
    ids = torch.randint(2, 258, (4, 1, 256), generator=random)
    cache = LaminaCache(
        model,
        calibrate(model, iter(ids), model_id="tiny <&> model"),
        tiers=8,
        window=WindowConfig(recent=64),
        max_bytes=226_000,
        controller=ControllerConfig(rate=1 / 16),
    )
    console = Console(file=io.StringIO(), width=200)
    prompt = torch.randint(2, 258, (1, 460), generator=random)
    with Trace(file, cache), Watch(cache, console, io.StringIO()), torch.inference_mode():
        model(prompt, **cache_kwarg(model, cache))
        for t in range(60):
            model(prompt[:, t : t + 1], **cache_kwarg(model, cache))
    return Traced(file, cache, console.file.getvalue())
