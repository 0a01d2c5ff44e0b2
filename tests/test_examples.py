"""Every example in the documentation runs: Python blocks, commands and docstrings, as they are written.

They run in a folder where ``MODEL`` is a tiny Llama, ``model.profile`` its profile, ``mine.jsonl`` and ``tuning.jsonl``
texts, ``protocol.toml`` what the documents show of it, with ``model``, ``tokenizer`` and ``inputs`` at hand.
"""

import ast
import doctest
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from typer.testing import CliRunner

from lamina import cli
from lamina.engines.hf import cache_kwarg
from tiny_llama import save_tiny

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = sorted((ROOT / "src" / "lamina").rglob("*.py"))
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NEWEST_KEYWORD = "cache"
"""What transformers 5.24 calls the cache, and examples with it."""

PROTOCOL = ROOT / "docs" / "evaluating.md"
NEEDS_DATA = re.compile(r"gsm8k_test|gsmhard|HumanEval|multi-key:8192")
"""Commands that need files which the project does not ship, or contexts that the tiny model has not."""


@dataclass(frozen=True)
class Example:
    """A piece of documentation that can be run."""

    file: Path
    line: int
    text: str

    @property
    def place(self) -> str:
        """Where it is."""
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def python_blocks(file: Path) -> Iterator[Example]:
    text = file.read_text(encoding="utf-8")
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield Example(file, text.count("\n", 0, block.start(1)) + 1, block[1])


def commands(file: Path) -> Iterator[Example]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if found := re.fullmatch(r" {4}(lamina .*)", line):
            yield Example(file, number, found[1])


def docstrings(file: Path) -> Iterator[Example]:
    """Docstrings that show how to use what they describe."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        text = ast.get_docstring(node, clean=False) if isinstance(node, documented) else None
        if text and (">>>" in text or re.search(r"^\s*Examples?\n\s*---", text, re.MULTILINE)):
            yield Example(file, node.body[0].lineno, text)


def not_run(examples: list[Example]) -> dict[str, str]:
    """Places (file:line) of examples that cannot run here, with the reason."""
    return {e.place: "needs a data set or a longer context" for e in examples if NEEDS_DATA.search(e.text)}


BLOCKS = [example for file in DOCUMENTS for example in python_blocks(file)]
COMMANDS = [example for file in DOCUMENTS for example in commands(file)]
DOCSTRINGS = [example for file in SOURCES for example in docstrings(file)]


NOT_RUN = not_run(COMMANDS)


def each(examples: list[Example]) -> pytest.MarkDecorator:
    marks = {place: pytest.mark.skip(reason=reason) for place, reason in NOT_RUN.items()}
    params = [pytest.param(e, id=e.place, marks=marks.get(e.place, ())) for e in examples]
    return pytest.mark.parametrize("example", params)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    save_tiny(folder / "MODEL", folder / "model.profile", model_id="MODEL")
    for name in ("mine", "tuning"):
        texts = (f"Paragraph {i} of {name} says {i * i} and then no more. " * 4 for i in range(200))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    shown = re.search(r"^```toml\n(.*?)^```$", PROTOCOL.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert shown is not None
    (folder / "protocol.toml").write_text(shown[1])
    return folder


@pytest.fixture
def scope(folder, monkeypatch) -> dict[str, Any]:
    """Names that examples may use; a model of their own, which they may change."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    tokenizer = AutoTokenizer.from_pretrained("MODEL")
    inputs = tokenizer("Why is the sky blue?", return_tensors="pt", return_token_type_ids=False)
    return {"model": AutoModelForCausalLM.from_pretrained("MODEL").eval(), "tokenizer": tokenizer, "inputs": inputs}


def for_this_transformers(text: str, scope: dict[str, Any]) -> str:
    (keyword,) = cache_kwarg(scope["model"], DynamicCache())
    return text.replace(f" {NEWEST_KEYWORD}=cache", f" {keyword}=cache")


@each(BLOCKS)
def test_python(example, scope):
    exec(compile(for_this_transformers(example.text, scope), example.place, "exec"), scope)


@each(COMMANDS)
def test_command(example, scope):
    result = CliRunner().invoke(cli.app, shlex.split(example.text)[1:], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


@each(DOCSTRINGS)
def test_docstring(example, scope):
    text = for_this_transformers(example.text, scope)
    test = doctest.DocTestParser().get_doctest(text, scope, example.place, str(example.file), example.line - 1)
    assert test.examples, "an Examples section without a line that starts with >>>"
    found: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=FLAGS)
    runner.run(test, out=found.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(found)


def test_there_are_examples():
    """What the tests above find: a change of the documents' form must not leave them without work."""
    assert any("LaminaCache" in block.text for block in BLOCKS)
    assert {shlex.split(e.text)[1] for e in COMMANDS} >= {"calibrate", "fidelity", "generate", "plan", "doctor"}
    assert any("CodecConfig" in example.text for example in DOCSTRINGS)
    assert set(NOT_RUN) <= {e.place for e in (*BLOCKS, *COMMANDS, *DOCSTRINGS)}
    assert len(NOT_RUN) == 4, "the four commands of EchoKV's workloads, and no other"
