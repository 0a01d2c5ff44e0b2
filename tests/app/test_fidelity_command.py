import json
import math

import pytest

from lamina.app.data import evaluation_source
from lamina.basis.profile import Profile
from lamina.basis.text import digest

KEYS = {
    "tier_mean",
    *("name", "bits_history", "bits_at_context", "kl_mean", "kl_median", "kl_p99", "top1", "ppl"),
    *("kv_bytes", "kv_bytes_bf16", "simulated", "kl_by_position", "kl_by_layer"),
}


@pytest.fixture
def fidelity(tiny, lamina, text_file):
    def run(*args, text=text_file, profile=tiny.profile):
        base = ("fidelity", "--model", tiny.model, "--profile", profile, "--text", text)
        return lamina(*base, "--seq-len", 448, "--max-tokens", 900, *args)

    return run


def test_json_on_stdout(tiny, fidelity, text_file):
    result = fidelity("--arms", "bf16,lamina-int2,kivi-int2", "--json", "-")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert set(report) == {"model", "text", "tokens", "arms"}
    assert (report["model"], report["text"], report["tokens"]) == (tiny.model, str(text_file), 896)
    assert [arm["name"] for arm in report["arms"]] == ["bf16", "lamina-int2", "kivi-int2"]
    assert all(set(arm) == KEYS for arm in report["arms"])
    assert [arm["simulated"] for arm in report["arms"]] == [False, False, True]
    assert [arm["tier_mean"] for arm in report["arms"]] == [16, 2, 2]
    bf16, lamina, _ = report["arms"]
    assert bf16["kl_mean"] < lamina["kl_mean"]
    # Two sequences of 448 tokens, a page a stretch; the first pages are read exactly.
    starts, kl = zip(*lamina["kl_by_position"])
    assert list(starts) == list(range(0, 448, 64)) and sum(kl) / len(kl) == pytest.approx(lamina["kl_mean"])
    assert kl[0] < 1e-6 < kl[-1]
    assert 2 < lamina["bits_history"] < 5
    assert all(len(arm["kl_by_layer"]) == 2 for arm in report["arms"])
    assert all(x < y / 10 for x, y in zip(bf16["kl_by_layer"], lamina["kl_by_layer"]))
    assert "Measuring 3 arms on 896 tokens" in result.stderr


def test_table_and_json_file(fidelity, tmp_path):
    out = tmp_path / "figures.json"
    result = fidelity(
        "--arms", "lamina-int4,kivi-int2", "--json", out, "--position-offset", "30%", "--recent", 128, "--no-layers"
    )
    assert result.exit_code == 0, result.output
    assert "from position 1,228 (30% of the model's 4,096)" in " ".join(result.stdout.split())
    assert "kivi-int2*" in result.stdout
    assert "* simulated" in result.stdout
    arms = json.loads(out.read_text())["arms"]
    assert [(arm["name"], arm["kl_by_layer"]) for arm in arms] == [("lamina-int4", []), ("kivi-int2", [])]


def test_default_text_and_arms(fidelity):
    result = fidelity("--json", "-", "--seq-len", 64, "--max-tokens", 64, text="default")
    assert result.exit_code == 0, result.output
    arms = json.loads(result.stdout)["arms"]
    assert [a["name"] for a in arms][:2] == ["bf16", "naive-int2"]
    assert all(a["bits_history"] is None for a in arms[1:])  # everything is in the window, and NaN is no JSON
    assert all(math.isfinite(a["kl_mean"]) for a in arms)


def test_warns_when_the_text_is_that_of_the_calibration(tiny, fidelity, tmp_path, text_file):
    profile = Profile.load(tiny.profile)
    profile.info["data_digest"] = digest(evaluation_source(str(text_file)).documents)
    profile.save(tmp_path / "same")
    args = ("--arms", "lamina-int2", "--max-tokens", 448)
    assert "flatter" in fidelity(*args, profile=tmp_path / "same").stderr
    assert "flatter" not in fidelity(*args).stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--arms", "lamina-int2,lamina-int3"), "unknown arm lamina-int3; bf16 lamina-int8"),
        (("--arms", ","), "unknown arm"),
        (("--text", "missing.txt"), "no file missing.txt"),
        (("--position-offset", "90%"), "position 3686 exceed 4096 --position-offset"),
        (("--position-offset", "far"), "position offset far"),
        (("--max-tokens", "100"), "max_tokens 100"),
        (("--sink", "1"), "sink=1"),
        (("--profile", "missing"), "no profile at missing"),
        (("--json", "missing/out.json"), "cannot write missing/out.json"),
        (("--field", "answer"), "no field"),
    ],
)
def test_wrong_settings(tiny, refused, text_file, args, words):
    base = ("fidelity", "--model", tiny.model, "--profile", tiny.profile, "--text", text_file, "--arms", "lamina-int2")
    refused(*base, "--seq-len", 640, "--max-tokens", 640, *args, words=words)


def test_wrong_model(tiny, other, refused, text_file):
    args = ("--profile", tiny.profile, "--text", text_file, "--seq-len", 128)
    refused("fidelity", "--model", other.model, *args, words="does not fit this model")
