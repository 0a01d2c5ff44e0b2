"""`lamina protocol`: all parts and the report, after a kill as well, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

FILE = """
arms = "bf16,lamina-int2,lamina-live-3"
seeds = 2

[[part]]
name = "text"
kind = "fidelity"
text = "{text}"
seq_len = 448
max_tokens = 448

[[part]]
name = "retrieval"
kind = "evaluate"
tasks = "multi-key:1300:0"
n = 2
warm_up = 2

[[part]]
name = "orders"
kind = "evaluate"
tasks = "multi-key:1300:0"
protocol = "live"
seeds = 1
n = 2
orders = 3
"""


@pytest.fixture
def given(tiny, text_file, tmp_path):
    """Arguments that run the protocol into a folder."""
    file = tmp_path / "protocol.toml"
    file.write_text(FILE.format(text=text_file))

    def args(folder, text=None):
        if text is not None:
            file.write_text(text)
        return [str(x) for x in ("protocol", file, "--model", tiny.model, "--profile", tiny.profile, "-o", folder)]

    return args


def answers(folder):
    """Answers of every part without what differs from run to run."""
    found = {}
    for log in sorted(folder.glob("*/answers.jsonl")):
        records = [json.loads(line) for line in log.read_text().splitlines()[1:]]
        kept = [r for r in records if r["kind"] != "environment"]
        found[log.parent.name] = [{k: x for k, x in r.items() if k != "seconds"} for r in kept]
    return found


def killed(args, folder, after):
    """Run the command and kill it once there are so many answers; how many it has left."""
    code = f"from lamina.cli import app; app({args!r})"
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and run.poll() is None:
        if sum(f.read_bytes().count(b'"right"') for f in folder.glob("*/answers.jsonl")) >= after:
            os.kill(run.pid, signal.SIGKILL)
            break
        time.sleep(0.02)
    return run.wait(timeout=30)


def test_all_parts_and_the_report_after_a_kill_too(lamina, given, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    first = lamina(*given(whole))
    assert first.exit_code == 0, first.output
    assert "Part 3 of 3: orders" in first.stderr and str(whole / "report.html") in first.stdout
    expected = answers(whole)
    assert [len(records) for records in expected.values()] == [2 * 3 + 2 * 2, 2 * 2 * 3 + 2]
    assert [r["arm"] for r in expected["orders"][6:]] == ["lamina-live-3"] * 4
    document = json.loads((whole / "text.json").read_text())
    assert [a["name"] for a in document["arms"]] == ["bf16", "lamina-int2", "lamina-live-3"]
    page = (whole / "report.html").read_text()
    assert "multi-key-1300-0, retrieval" in page and "multi-key-1300-0, orders" in page

    assert killed(given(cut), cut, after=5) == -signal.SIGKILL
    before = (cut / "text.json").stat().st_mtime_ns
    left = sum(f.read_bytes().count(b'"right"') for f in cut.glob("*/answers.jsonl"))
    assert 5 <= left < 22
    again = lamina(*given(cut))
    assert again.exit_code == 0, again.output
    assert answers(cut) == expected and (cut / "report.html").exists()
    assert (cut / "text.json").stat().st_mtime_ns == before, "what is done is not done again"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no [[part]]"),
        ("x = ", "cannot read the protocol"),
        ('[[part]]\nname = "a"\nkind = "b"', "part a has kind 'b' fidelity, evaluate"),
        ('[[part]]\nkind = "fidelity"', "every part needs a name"),
        ('[[part]]\nname = "../a"\nkind = "fidelity"', "can name a file"),
        ('[[part]]\nname = "a"\nkind = "fidelity"\ntokens = 3', "part a has tokens max_tokens"),
        ('model = "x"\n[[part]]\nname = "a"\nkind = "fidelity"', "the file has model"),
        ('[[part]]\nname = "a"\nkind = "evaluate"\narms = "bf16"', "part a lacks an option tasks"),
        ('[[part]]\nname = "a"\nkind = "evaluate"\ntasks = "x"\nn = "3"', "n of part a is '3' its type is int"),
        ('[[part]]\nname = "a"\nkind = "evaluate"\narms = "bf16"\ntasks = "multi-key:5000"', "exceed 4,096"),
        ('[[part]]\nname = "a"\nkind = "evaluate"\narms = "all"\ntasks = "multi-key:1500"', "lamina-live tune"),
    ],
)
def test_wrong_files_are_refused_before_anything_runs(refused, given, tmp_path, text, words):
    refused(*given(tmp_path / "run", text), words=words)


def test_results_with_other_settings_are_not_taken(lamina, refused, given, tmp_path):
    folder = tmp_path / "run"
    text = '[[part]]\nname = "a"\nkind = "fidelity"\narms = "bf16"\nseq_len = 64\nmax_tokens = {}'
    lamina(*given(folder, text.format(64)))
    assert (folder / "a.json").exists()
    refused(*given(folder, text.format(128)), words="a.json measured with other settings delete it")
