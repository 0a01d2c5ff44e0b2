import json

import pytest

PROMPT = "Once upon a time there was a cache. " * 20


def test_streams_text_then_one_line(tiny, lamina):
    result = lamina("generate", tiny.model, "--profile", tiny.profile, "--prompt", PROMPT, "--max-new-tokens", 5)
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("\n")
    line = result.stderr.splitlines()[-1]
    for part in ("5 tokens", "tok/s", "bits in history", "bits at this context", "in bf16", "0 planes shed"):
        assert part in line


def test_json_is_alone_on_stdout_and_equals_the_stream(tiny, lamina):
    args = ("generate", tiny.model, "--profile", tiny.profile, "--prompt", PROMPT, "--max-new-tokens", 8)
    report = json.loads(lamina(*args, "--json").stdout)
    assert report["tokens"] == 8
    assert report["prompt_tokens"] == len(f"|user\n{PROMPT}\n|assistant\n")
    assert report["kv_bytes_bf16"] == 4 * 2 * 2 * 16 * (report["prompt_tokens"] + 7)
    assert report["bits_history"] > 2
    assert lamina(*args).stdout == report["text"] + "\n"


def test_prompt_from_a_file_and_from_stdin(tiny, lamina, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    args = ("generate", tiny.model, "--profile", tiny.profile, "--max-new-tokens", 4)
    outputs = {
        lamina(*args, "--prompt", PROMPT).stdout,
        lamina(*args, "--prompt-file", file).stdout,
        lamina(*args, stdin=PROMPT).stdout,
    }
    assert len(outputs) == 1


def test_without_the_chat_template(tiny, lamina):
    args = ("--prompt", PROMPT, "--max-new-tokens", 2, "--json", "--no-chat")
    report = json.loads(lamina("generate", tiny.model, "--profile", tiny.profile, *args).stdout)
    assert report["prompt_tokens"] == len(PROMPT)


def test_a_short_answer_has_no_speed_and_no_history(tiny, lamina):
    args = ("--prompt", "hi", "--max-new-tokens", 1)
    result = lamina("generate", tiny.model, "--profile", tiny.profile, *args)
    assert "1 tokens; no history yet" in result.stderr
    report = json.loads(lamina("generate", tiny.model, "--profile", tiny.profile, *args, "--json").stdout)
    assert report["tokens_per_second"] is None
    assert report["bits_history"] is None


def test_tiers_and_windows_change_the_bytes(tiny, lamina):
    def n_bytes(*args):
        base = ("generate", tiny.model, "--profile", tiny.profile, "--prompt", PROMPT, "--max-new-tokens", 1, "--json")
        return json.loads(lamina(*base, *args).stdout)["kv_bytes"]

    assert n_bytes("--tier", 2) < n_bytes("--tier", "k4v2") == n_bytes() < n_bytes("--tier", 4) < n_bytes("--tier", 8)
    assert n_bytes("--recent", 0, "--sink", 0) < n_bytes()


def test_sampling_follows_the_seed(tiny, lamina):
    def text(seed):
        args = ("--prompt", "hi", "--max-new-tokens", 12, "--temperature", 1.5, "--top-p", 0.95, "--seed", seed)
        return lamina("generate", tiny.model, "--profile", tiny.profile, *args).stdout

    assert text(1) == text(1) != text(2)


def test_memory_pressure_takes_bits(tiny, lamina):
    args = ("--prompt", PROMPT, "--max-new-tokens", 2, "--tier", 8, "--json")
    free = json.loads(lamina("generate", tiny.model, "--profile", tiny.profile, *args).stdout)
    limit = free["kv_bytes"] - 8000
    tight = json.loads(lamina("generate", tiny.model, "--profile", tiny.profile, *args, "--max-bytes", limit).stdout)
    assert free["bits_history"] > 8 > tight["bits_history"], "the prompt's pages are written with less"
    assert tight["kv_bytes"] <= limit


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--prompt", ""), "prompt is empty --prompt-file"),
        (("--prompt", " \n"), "prompt is empty"),
        ((), "prompt is empty"),
        (("--prompt", "a", "--prompt-file", "b"), "both given"),
        (("--prompt-file", "missing.txt"), "cannot read missing.txt"),
        (("--prompt", "a", "--tier", "5"), "tier 5"),
        (("--prompt", "a", "--sink", "10"), "sink=10 multiple of 64"),
        (("--prompt", "a", "--recent", "-64"), "recent=-64"),
        (("--prompt", "a", "--max-bytes", "much"), "--max-bytes much 512M"),
        (("--prompt", "a", "--max-bytes", "1K"), "max_bytes=1,024 too small"),
        (("--prompt", "a", "--temperature", "-1"), "temperature negative"),
        (("--prompt", "a", "--top-p", "0.5"), "top-p temperature"),
        (("--prompt", "a", "--temperature", "1", "--top-p", "0"), "top-p"),
        (("--prompt", "a", "--max-new-tokens", "5000"), "5000 exceed 4096 positions"),
        (("--prompt", "a", "--dtype", "fp4"), "unknown dtype"),
    ],
)
def test_wrong_settings(tiny, refused, args, words):
    refused("generate", tiny.model, "--profile", tiny.profile, *args, words=words)


def test_wrong_profile(tiny, other, refused, tmp_path):
    (tmp_path / "junk").write_bytes(b"not a profile")
    for model, profile, words in (
        (other.model, tiny.profile, "does not fit this model layers"),
        (tiny.model, tmp_path / "none", "no profile lamina calibrate"),
        (tiny.model, tmp_path / "junk", "cannot be read"),
    ):
        refused("generate", model, "--profile", profile, "--prompt", "a", words=words)


def test_chat_without_a_template(other, lamina, refused, tmp_path, text_file):
    profile = tmp_path / "p"
    args = ("--data", text_file, "--tokens", 512, "--seq-len", 128)
    assert lamina("calibrate", other.model, "-o", profile, *args).exit_code == 0
    args = ("generate", other.model, "--profile", profile, "--prompt", "a", "--max-new-tokens", 1)
    refused(*args, "--chat", words="no chat template --no-chat")
    assert json.loads(lamina(*args, "--json").stdout)["prompt_tokens"] == 1
