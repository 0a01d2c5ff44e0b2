import os
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lamina.app import demo, demo_prompt
from lamina.app.demo import DEMO_ARMS, DemoRequest, Effort, python_lines
from lamina.app.demo_prompt import built_in_prompt
from lamina.app.demo_report import command_line
from lamina.app.loading import load_model
from lamina.app.screen import Screen
from lamina.basis.text import load_documents
from lamina.errors import DataError

SMALL = Effort(calibration=600, fidelity=512, seq_len=512, answer=6, timed=4)


@pytest.fixture(autouse=True)
def small_and_isolated(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "FULL", SMALL)
    monkeypatch.setattr(demo, "QUICK", Effort(300, 512, 512, 3, 4))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def profiles(tmp_path):
    return sorted((tmp_path / "cache" / "lamina" / "profiles").glob("*"))


def test_the_whole_demo_and_its_profile_the_next_time(tiny, lamina, tmp_path):
    result = lamina("demo", "--model", tiny.model)
    assert result.exit_code == 0, result.output
    assert "Calibrating on 1,024 tokens" in result.stderr
    (profile,) = profiles(tmp_path)
    for part in (*DEMO_ARMS, "lamina-int2 answers a prompt of", str(profile), "LaminaCache(model", "The demo took"):
        assert part in result.stdout
    again = lamina("demo", "--model", tiny.model)
    assert "Using the profile of an earlier demo" in again.stderr
    assert "Calibrating" not in again.stderr
    quick = lamina("demo", "--model", tiny.model, "--quick")
    assert "Calibrating on 512 tokens" in quick.stderr
    assert len(profiles(tmp_path)) == 2


def test_the_report_holds_what_the_terminal_shows(tiny, lamina, tmp_path, text_file):
    args = ("demo", "--model", tiny.model, "--data", text_file, "--quick", "--report", "new/report.html")
    result = lamina(*args)
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip().endswith("Its figures as pictures: new/report.html")
    page = ElementTree.parse(tmp_path / "new" / "report.html").getroot()
    rows = [["".join(c.itertext()) for c in r] for r in page.findall(".//table[@id='comparison']/tbody/tr")]
    words = [line.split() for line in result.stdout.splitlines()]
    shown = [line for line in words if len(line) == 8 and line[0] in DEMO_ARMS]
    assert [" ".join(row).split() for row in rows] == shown
    assert len(rows) == len(DEMO_ARMS)
    drift = [[c.text for c in r] for r in page.findall(".//table[@id='drift-data']/tbody/tr")]
    assert [row[0] for row in drift] == ["0", "1"]
    assert all(float(two) > float(four) > 0 for _, two, four in drift)
    facts = {r[0].text: r[1].text for r in page.findall(".//table[@id='environment']/tbody/tr")}
    assert (facts["model"], facts["fidelity"]) == ("model, float32", "512 tokens")
    assert "transformers 5." in facts["versions"]
    command = "".join(page.find(".//pre[@id='command']").itertext())
    assert shlex.split(command) == ["lamina", *map(str, args)]
    assert "calibration did not see" in [p.text for p in page.iter("p")][-2]


def test_the_report_lies_in_the_working_directory_unless_told(tiny, lamina, tmp_path, text_file):
    result = lamina("demo", "--model", tiny.model, "--data", text_file, "--quick")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "lamina-demo.html").is_file()


def test_the_command_is_as_short_as_it_can_be():
    assert command_line(DemoRequest()) == "lamina demo"
    request = DemoRequest("my model", Path("p.txt"), 7, ("a", "b c"), "x+y", True, Path("r.html"))
    assert shlex.split(command_line(request)) == [
        *("lamina", "demo", "--model", "my model", "--prompt-file", "p.txt", "--max-new-tokens", "7"),
        *("--data", "a", "--data", "b c", "--field", "x+y", "--quick", "--report", "r.html"),
    ]


def test_a_report_that_cannot_be_written(tiny, refused, tmp_path, text_file, monkeypatch):
    args = ("demo", "--model", tiny.model, "--data", text_file, "--quick", "--report")
    refused(*args, tmp_path, words="is a folder")
    (tmp_path / "file").write_text("")
    refused(*args, tmp_path / "file" / "r.html", words="cannot write --report")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    refused(*args, "r.html", words="permission denied --report")
    assert not profiles(tmp_path)


def test_a_damaged_profile_is_made_again(tiny, lamina, tmp_path, text_file):
    args = ("demo", "--model", tiny.model, "--quick", "--data", text_file)
    assert lamina(*args).exit_code == 0
    (profile,) = profiles(tmp_path)
    profile.write_bytes(b"junk")
    result = lamina(*args)
    assert result.exit_code == 0, result.output
    assert "Calibrating again" in result.stderr
    assert profile.stat().st_size > 1000


def test_own_prompt_data_and_length(tiny, lamina, tmp_path, text_file):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("x" * 500)
    args = ("--prompt-file", prompt, "--max-new-tokens", 2, "--data", text_file)
    result = lamina("demo", "--model", tiny.model, *args)
    assert result.exit_code == 0, result.output
    assert "a prompt of 518 tokens" in result.stdout
    assert "2 tokens" in result.stdout
    assert f"({text_file})" in result.stdout


def test_without_a_model_the_small_one_is_fetched(tiny, lamina, monkeypatch, text_file):
    monkeypatch.setattr(demo, "fetch_small_model", lambda folder, progress: progress("Downloading") or tiny.model)
    result = lamina("demo", "--quick", "--data", text_file)
    assert result.exit_code == 0, result.output
    assert "Downloading" in result.stderr


def test_rows_are_those_of_the_arms(tiny, text_file):
    rows = demo.run_demo(demo.DemoRequest(tiny.model, data=(str(text_file),), quick=True), Screen())
    assert [row.name for row in rows] == list(DEMO_ARMS)
    named = {row.name: row for row in rows}
    assert named["bf16"].kv_bytes == named["bf16"].kv_bytes_bf16
    assert named["lamina-int2"].kv_bytes < named["lamina-k4v2"].kv_bytes < named["lamina-int4"].kv_bytes
    assert all(row.tokens_per_second > 0 for row in rows)
    assert named["lamina-int4"].kl_mean < named["naive-int2"].kl_mean


def test_the_python_lines_work(tiny, capsys):
    loaded = load_model(tiny.model, Screen())
    inputs = loaded.tokenizer("x" * 500, return_tensors="pt", return_token_type_ids=False)
    lines = python_lines(loaded, tiny.profile)
    assert len(lines) == 3
    lines[-1] = "out = " + lines[-1].replace("max_new_tokens=200", "max_new_tokens=3, min_new_tokens=3")
    scope = {"model": loaded.model, "inputs": inputs}
    exec("\n".join(lines), scope)
    assert scope["out"].shape == (1, 503)


def test_the_built_in_prompt_is_long_enough_and_not_calibrated_on():
    for size in (1500, 20_000):
        prompt = built_in_prompt(len, size)
        assert size <= len(prompt) < size + 40_000
        assert prompt.endswith(demo_prompt.QUESTION)
    everything = "".join(load_documents("default"))
    assert all(demo_prompt._source(name) not in everything for name in demo_prompt.MODULES)


def test_without_source_text_there_is_no_built_in_prompt(monkeypatch):
    monkeypatch.setattr(demo_prompt, "_source", lambda name: "")
    with pytest.raises(DataError, match="--prompt-file"):
        built_in_prompt(len)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--max-new-tokens", "4000"), "exceed 4096 positions"),
        (("--prompt-file", "missing.txt"), "cannot read missing.txt"),
        (("--data", "missing.txt"), "no file missing.txt"),
    ],
)
def test_wrong_settings(tiny, refused, args, words, text_file):
    refused("demo", "--model", tiny.model, "--data", text_file, *args, words=words)


def test_wrong_models(other, refused, tmp_path, text_file):
    refused("demo", "--data", text_file, "--model", tmp_path / "none", words="no model folder")
    refused("demo", "--data", text_file, "--model", other.model, words="exceed 128 positions")


def test_a_cache_folder_that_cannot_be_written(tiny, refused, tmp_path, text_file):
    (tmp_path / "cache").write_text("")
    refused("demo", "--data", text_file, "--model", tiny.model, words="cannot write XDG_CACHE_HOME")


def test_a_text_of_one_document_cannot_be_held_out(tiny, refused, tmp_path):
    (tmp_path / "short.txt").write_text("hello")
    refused("demo", "--model", tiny.model, "--data", tmp_path / "short.txt", words="one document")
