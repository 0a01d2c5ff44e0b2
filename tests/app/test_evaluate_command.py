"""`lamina evaluate`: what it writes, that it goes on, and what it refuses."""

import json
import re
import shlex
import subprocess

import pytest
import torch

from lamina import __version__
from lamina.app.environment import commit


def args(tiny, folder, **options):
    given = {"tasks": "multi-key:1500", "arms": "bf16,lamina-int2", "n": 2, "seeds": 2} | options
    flags = [x for name, value in given.items() for x in (f"--{name}", value)]
    return ("evaluate", "--model", tiny.model, "--profile", tiny.profile, "-o", folder, *flags)


def assert_records(tiny, folder, environment, answers):
    """What reports need besides the answers: where they come from, and bytes by kind against bfloat16."""
    assert environment["kind"] == "environment"
    assert shlex.split(environment["command"]) == [
        *("lamina", "evaluate", "--model", tiny.model, "--profile", tiny.profile, "--arms", "bf16,lamina-int2"),
        *("--tasks", "multi-key:1500", "--output", str(folder), "--n", "2", "--seeds", "2"),
    ]
    assert (environment["lamina"], environment["torch"]) == (__version__, torch.__version__)
    assert (environment["dtype"], environment["packed"]) == ("float32", list(range(environment["layers"])))
    for r in answers:
        assert sum(r["kv_bytes_by_kind"].values()) == r["kv_bytes"] and r["simulated"] is False
        assert (r["kv_bytes"] == r["kv_bytes_bf16"]) == (r["arm"] == "bf16")
    kinds = {r["arm"]: list(r["kv_bytes_by_kind"]) for r in answers}
    assert kinds == {"bf16": ["rows"], "lamina-int2": ["codes", "scales", "centers", "windows", "page_tables"]}


def test_commits_are_those_of_the_file(tmp_path):
    assert commit(tmp_path / "nowhere.py") is None, "another checkout around it does not count"
    run = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b"]
    (tmp_path / "a.py").write_text("1")
    for words in (["init", "-q"], ["add", "a.py"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*run, *words], check=True)
    found = commit(tmp_path / "a.py")
    assert found and re.fullmatch("[0-9a-f]{7,}", found)
    assert commit(tmp_path / "b.py") is None
    (tmp_path / "a.py").write_text("2")
    assert commit(tmp_path / "a.py") == found + "+"


def test_a_run_its_files_and_more_of_it(tiny, lamina, tmp_path):
    folder = tmp_path / "run"
    first = lamina(*args(tiny, folder))
    assert first.exit_code == 0 and "**multi-key-1500**" in first.stdout
    assert (folder / "summary.md").read_text(encoding="utf-8").strip() in first.stdout
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    answers = [r for r in lines if r.get("kind") == "answer"]
    assert len(answers) == 2 * 2 * 2
    assert_records(tiny, folder, lines[1], answers)
    again = lamina(*args(tiny, folder))
    assert again.stdout == first.stdout
    assert (folder / "answers.jsonl").read_text(encoding="utf-8").count('"answer"') == 8
    more = lamina(*args(tiny, folder, arms="bf16,lamina-int2,lamina-int8", tasks="multi-key:1500,aggregation:1400"))
    assert more.exit_code == 0
    scores = json.loads((folder / "summary.json").read_text())["scores"]
    assert [(s["task"], s["arm"], s["n"]) for s in scores] == [
        (task, arm, 4)
        for task in ("multi-key-1500", "aggregation-1400")
        for arm in ("bf16", "lamina-int2", "lamina-int8")
    ]
    assert scores[1]["against"]["n"] == 4 and scores[0]["against"] is None
    assert 2 < scores[1]["bits"] < 5 < scores[2]["bits"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tasks": "multi-key"}, "multi-key no length multi-key:2048"),
        ({"tasks": "riddles:9"}, "unknown task riddles:9 aggregation:TOKENS humaneval:FILE"),
        ({"tasks": "answers:/no/such.jsonl"}, "names no file"),
        ({"tasks": ""}, "no task"),
        ({"tasks": "multi-key:1500,multi-key:1500"}, "a task twice"),
        ({"tasks": "multi-key:5000"}, "exceed the model's 4,096 positions"),
        ({"tasks": "aggregation:1500:2"}, "too many numbers aggregation:TOKENS"),
        ({"tasks": "multi-key:1500:1:2"}, "too many numbers"),
        ({"tasks": "multi-key:1500:x"}, "has no length"),
        ({"orders": 2}, "--orders 2 needs --protocol live"),
        ({"tasks": "multi-key:40"}, "tokens is 40"),
        ({"arms": "int2"}, "unknown arm int2"),
        ({"protocol": "loose"}, "unknown protocol loose frozen live"),
        ({"recent": 100}, "recent=100"),
    ],
)
def test_wrong_settings_are_refused_by_name(tiny, refused, tmp_path, options, words):
    refused(*args(tiny, tmp_path / "run", **options), words=words)


def test_a_folder_of_another_run_is_refused(tiny, lamina, refused, tmp_path):
    assert lamina(*args(tiny, tmp_path / "run", n=1)).exit_code == 0
    refused(*args(tiny, tmp_path / "run", n=3), words="other settings (n) choose another folder")
