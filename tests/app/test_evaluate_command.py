"""`lamina evaluate`: what it writes, that it goes on, and what it refuses."""

import json

import pytest


def args(tiny, folder, **options):
    given = {"tasks": "multi-key:1500", "arms": "bf16,lamina-int2", "n": 2, "seeds": 2} | options
    flags = [x for name, value in given.items() for x in (f"--{name}", value)]
    return ("evaluate", "--model", tiny.model, "--profile", tiny.profile, "-o", folder, *flags)


def test_a_run_its_files_and_more_of_it(tiny, lamina, tmp_path):
    folder = tmp_path / "run"
    first = lamina(*args(tiny, folder))
    assert first.exit_code == 0 and "**multi-key-1500**" in first.stdout
    assert (folder / "summary.md").read_text(encoding="utf-8").strip() in first.stdout
    lines = (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + 2 * 2 * 2
    again = lamina(*args(tiny, folder))
    assert again.stdout == first.stdout and len((folder / "answers.jsonl").read_text().splitlines()) == 9
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
