import json

import pytest

from lamina.basis.profile import Profile

SHORT = ("--tokens", 704, "--seq-len", 704)


@pytest.fixture
def tune(tiny, lamina, text_file, tmp_path):
    def run(*args, out="tuned.profile"):
        base = ("tune", tiny.model, "--profile", tiny.profile, "-o", tmp_path / out, "--data", text_file)
        return lamina(*base, *SHORT, *args), tmp_path / out

    return run


def test_tunes_to_bits_and_generates_with_it(tune, tiny, lamina, text_file):
    result, out = tune("--target-bits", 3, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["policy"], report["target_bits"], report["goal"]) == ("allocate", 3.0, "3 bits on average")
    assert report["texts"][0]["text"] == str(text_file) and report["texts"][0]["tier_mean"] <= 3.0
    tuning = Profile.load(out).tuning
    assert tuning is not None and tuning.measured["texts"][0]["kl_mean"] == report["texts"][0]["kl_mean"]
    text = ("--prompt", "x" * 500, "--max-new-tokens", 70, "--json")
    live = json.loads(lamina("generate", tiny.model, "--profile", out, *text).stdout)
    assert live["firings"] == 1 and live["tier_mean"] <= 3.0
    trace = out.parent / "run.jsonl"
    watched = lamina("generate", tiny.model, "--profile", out, *text[:-1], "--watch", "--trace", trace)
    assert watched.exit_code == 0 and "1 firing" in watched.stderr and "1 firings, tiers" in watched.stderr
    assert len(watched.stdout.strip()) > 0, "the text comes as it does without a view"
    shown = json.loads(lamina("trace", trace, "--json").stdout)
    assert shown["firings"] == 1 and shown["pages_closed"] > 0
    fixed = json.loads(lamina("generate", tiny.model, "--profile", out, *text, "--fixed").stdout)
    assert fixed["firings"] is None


def test_tunes_to_a_kl_and_keeps_weights(tune, lamina, tiny, tmp_path, text_file):
    result, out = tune("--max-kl", 0.5, "--policy", "hysteresis")
    assert result.exit_code == 0, result.output
    assert "hysteresis, tau" in result.stdout and "mean KL up to 0.5 nats" in result.stdout
    assert "Measuring what each layer's drift does" in result.stderr
    again = ("tune", tiny.model, "--profile", out, "-o", tmp_path / "again", "--data", text_file, *SHORT)
    result = lamina(*again, "--max-kl", 0.4)
    assert result.exit_code == 0 and "Measuring what each layer's drift does" not in result.stderr
    assert Profile.load(tmp_path / "again").tuning.weights == Profile.load(out).tuning.weights


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "one goal --max-kl --target-bits"),
        (("--max-kl", 0.1, "--target-bits", 3), "one goal"),
        (("--target-bits", 1.5), "--target-bits 1.5 between 2 and 8"),
        (("--max-kl", 0), "--max-kl 0 positive"),
        (("--max-kl", "nan"), "--max-kl nan positive"),
        (("--max-kl", 0.1, "--policy", "allocate"), "unknown policy 'allocate'; threshold, hysteresis, vote"),
        (("--target-bits", 3, "--policy", "vote"), "--policy goes with --max-kl"),
        (("--max-kl", 0.1, "--seq-len", 300, "--tokens", 300), "raise --seq-len to 704"),
        (("--max-kl", 0.1, "--seq-len", 8192, "--tokens", 8192), "4096 positions"),
    ],
)
def test_wrong_goals(tune, args, words):
    result, out = tune(*args)
    assert result.exit_code == 2 and result.stdout == "" and not out.exists()
    assert all(word in result.stderr.splitlines()[-1] for word in words.split())


def test_generate_refuses_what_excludes_itself(tiny, refused, text_file):
    base = ("generate", tiny.model, "--profile", tiny.profile, "--prompt", "x")
    refused(*base, "--live", words="no controller settings lamina tune")
    refused(*base, "--fixed", "--target-bits", 3, words="--fixed")
    refused(*base, "--tier", 4, "--target-bits", 3, words="--tier 4 fixes")
    refused(*base, "--target-bits", 9, words="--target-bits 9 between 2 and 8")
    refused(*base, "--target-bits", 3, "--trace", tiny.profile, words="would replace a file that is read")
    refused(*base, "--target-bits", 3, "--trace", text_file / "run.jsonl", words="cannot write")
