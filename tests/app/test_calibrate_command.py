import json

import pytest

from lamina.app.data import calibration_sources
from lamina.basis.profile import Profile
from lamina.basis.text import digest

SHORT = ("--tokens", 1000, "--seq-len", 200)


def test_learns_a_profile_from_two_sources(tiny, lamina, tmp_path, text_file):
    out = tmp_path / "new" / "profile.safetensors"
    args = ("--data", "default", "--data", text_file, *SHORT, "--max-context", 1000, "--tier", "k4v2")
    result = lamina("calibrate", tiny.model, "-o", out, *args, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    profile = Profile.load(out)
    sources = calibration_sources(["default", str(text_file)])
    assert profile.info["data_digest"] == digest(d for s in sources for d in s.documents)
    assert profile.info["tokens"] == report["tokens"] == 1000
    assert profile.info["max_position"] == report["max_position"] == 1000
    assert profile.tiers == [(4, 2)] * 2
    assert profile.model_id == tiny.model
    assert report["random_positions"] is True
    assert report["positions"].startswith("random, up to 1,000")
    assert report["file_bytes"] == out.stat().st_size
    assert "Calibrating" in result.stderr


def test_prints_what_was_learnt(tiny, lamina, tmp_path, text_file):
    out = tmp_path / "p.safetensors"
    result = lamina("calibrate", tiny.model, "-o", out, *SHORT, "--data", text_file, "--transform", "oscar")
    assert result.exit_code == 0, result.output
    for part in (str(out), "1,000", "random, up to 4,096", "oscar", str(text_file)):
        assert part in result.stdout


def test_the_seed_changes_the_profile(tiny, lamina, tmp_path, text_file):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        args = ("--data", text_file, *SHORT, "--seed", seed)
        assert lamina("calibrate", tiny.model, "-o", tmp_path / name, *args).exit_code == 0
    first, again, other = ((tmp_path / name).read_bytes() for name in "abc")
    assert first == again != other


def test_says_when_there_is_too_little_text(tiny, lamina, tmp_path, text_file):
    args = ("--data", text_file, "--tokens", 10**6, "--seq-len", 1024)
    result = lamina("calibrate", tiny.model, "-o", tmp_path / "p", *args)
    assert result.exit_code == 0
    assert "of the 1,000,000 tokens asked for" in result.stderr


def test_says_why_positions_do_not_move(other, lamina, tmp_path, text_file):
    args = ("--data", text_file, "--tokens", 512, "--seq-len", 128)
    result = lamina("calibrate", other.model, "-o", tmp_path / "p", *args, "--json")
    assert result.exit_code == 0, result.output
    assert "no room to move" in json.loads(result.stdout)["positions"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tier", "3"), "tier 3"),
        (("--transform", "fourier"), "unknown transform fourier balanced"),
        (("--dtype", "int8"), "unknown dtype"),
        (("--device", "tpu"), "unknown device"),
        (("--data", "missing.txt"), "no file missing.txt"),
        (("--data", "default", "--data", "default"), "more than once"),
        (("--seq-len", "5000"), "5000 positions --seq-len"),
        (("--max-context", "1000"), "2048 --max-context"),
    ],
)
def test_wrong_settings(tiny, refused, tmp_path, text_file, args, words):
    refused("calibrate", tiny.model, "-o", tmp_path / "p", "--data", text_file, *args, words=words)
    assert list(tmp_path.iterdir()) == [text_file]


def test_wrong_model(refused, tmp_path):
    refused("calibrate", tmp_path / "none", "-o", tmp_path / "p", words="no model folder")
    refused("calibrate", tmp_path, "-o", tmp_path / "p", words="cannot load configuration")
    refused("calibrate", "./none", "-o", tmp_path / "p", words="no model folder")


def test_output_that_cannot_be_written(tiny, refused, tmp_path):
    refused("calibrate", tiny.model, "-o", tmp_path, words="is a folder")
    (tmp_path / "file").write_text("")
    refused("calibrate", tiny.model, "-o", tmp_path / "file" / "p", words="cannot write -o")
