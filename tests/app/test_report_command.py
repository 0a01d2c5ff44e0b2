"""`lamina report`: what it draws from what `lamina evaluate` left, and the folders that it refuses."""

import json

import pytest

from evaluations import ENVIRONMENT, SETTINGS, answer, parse, records, table, words, write
from lamina.app.evaluation_reader import read_folder
from lamina.app.evaluation_report import report_document, run_report
from lamina.app.report.evaluation_page import render_evaluation
from lamina.errors import ConfigError, DataError
from lamina.eval.log import read_log


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path)


def test_a_run_of_the_tiny_model(tiny, lamina, refused, tmp_path):
    folder = tmp_path / "run"
    assert lamina(
        "evaluate", "--model", tiny.model, "--profile", tiny.profile, "-o", folder, "--n", 1, "--seeds", 2,
        "--tasks", "multi-key:800", "--arms", "bf16,lamina-int2,kivi-int2",
    ).exit_code == 0  # fmt: skip
    before = (folder / "answers.jsonl").read_bytes()
    shown = lamina("report", folder)
    assert shown.exit_code == 0 and "report.html" in shown.stdout and "report.md" in shown.stdout
    page = parse((folder / "report.html").read_text(encoding="utf-8"))
    assert [row[0] for row in table(page, "w1-scores")] == ["arm", "bf16", "lamina-int2", "kivi-int2 (simulated)"]
    assert table(page, "w1-bytes-data")[1][-1] == "100.0%"
    facts = dict(table(page, "environment")[1:])
    assert facts["dtype"] == "float32" and facts["packed layers"] == "2 of 2"
    command, again = "".join(page.find(".//pre[@id='command']").itertext()).splitlines()
    assert command.startswith("lamina evaluate --model") and command.endswith("--n 1 --seeds 2")
    assert again == f"lamina report {folder}"
    markdown = (folder / "report.md").read_text(encoding="utf-8")
    assert "| kivi-int2 (simulated) | 3." in markdown and command in markdown
    document = json.loads(lamina("report", folder, "--json").stdout)
    assert [s["arm"] for s in document["runs"][0]["scores"]] == ["bf16", "lamina-int2", "kivi-int2"]
    assert document["runs"][0]["scores"][1]["against"]["verdict"] == "undecided"
    assert (folder / "answers.jsonl").read_bytes() == before
    other = lamina("report", folder, "-o", tmp_path / "new" / "page.html")
    assert other.exit_code == 0 and (tmp_path / "new" / "page.md").read_text(encoding="utf-8") == markdown
    refused("report", folder, "-o", folder / "summary.html", words="summary.md belongs to the evaluation itself")
    refused("report", folder, "-o", tmp_path / "page.md", words="Markdown table goes another file")
    refused("report", folder, "-o", tmp_path / "x.html", "--json", words="--json writes no page")
    refused("report", tmp_path / "none", words="does not exist name the folder")


def test_several_runs_are_kept_apart(tmp_path):
    for name, protocol in (("frozen", "frozen"), ("live", "live")):
        (tmp_path / name).mkdir()
        write(tmp_path / name, settings=SETTINGS | {"protocol": protocol})
    (tmp_path / "notes.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{")
    page = parse(render_evaluation(read_folder(tmp_path)))
    assert [h.text for h in page.iter("h2")][:2] == ["t, frozen", "t, live"]
    assert table(page, "w1-scores") == table(page, "w2-scores") and table(page, "w2-scores")[1][3] == "20"
    assert ["protocol (differs)", "frozen", "live"] in table(page, "settings")
    assert table(page, "settings")[1] == ["model", "models/tiny <&> model", "models/tiny <&> model"]
    notes = " ".join(words(p) for p in page.iterfind(".//p[@class='note']"))
    assert "never across two" in notes and "not read: broken.json, notes.json." in notes


def test_environments_without_answers_do_not_count(tmp_path):
    moved = ENVIRONMENT | {"device": "CPU", "command": "lamina evaluate again"}
    given = [moved, *records(), moved]
    (run,) = read_folder(write(tmp_path, given)).runs
    assert run.environments == [ENVIRONMENT] and run.packed == [1, 3, 5]


def test_a_run_that_goes_on(folder):
    whole = report_document(folder)
    path = folder / "answers.jsonl"
    (folder / "summary.json").write_text(json.dumps({"scores": [{"task": "t", "arm": "bf16", "n": 3}]}))
    with path.open("ab") as file:
        file.write(b'{"kind": "answer", "task": "t"')
    cut = path.read_bytes()
    found = report_document(folder)
    notes = " ".join(found["runs"][0].pop("notes"))
    assert "cut short" in notes and "summary.json is older than answers.jsonl" in notes
    whole["runs"][0].pop("notes")
    assert found == whole and path.read_bytes() == cut, "what is cut off is not ours to take away"
    assert read_log(path).cut and not read_log(path).path.with_suffix(".md").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"hold no answers.jsonl \(nothing at all\); name the folder"),
        (b"", "holds nothing yet; run `lamina evaluate`"),
        (b'{"run": "1", "sett', "holds nothing yet"),
        (b'{"text": "mine"}\n', "is no log of an evaluation"),
        (b'{"run": "1", "settings": {}}\n', "is no log of an evaluation"),
        (b"not json\n", "line 1 is damaged"),
        (b"[1]\n", "line 1 is no record"),
    ],
)
def test_folders_of_other_kinds(tmp_path, content, message):
    if content is not None:
        (tmp_path / "answers.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_folder(tmp_path)


def test_folders_that_hold_too_little(tmp_path):
    with pytest.raises(DataError, match=r"hold no answers.jsonl \(mine.txt\)"):
        (tmp_path / "mine.txt").write_text("")
        read_folder(tmp_path)
    with pytest.raises(DataError, match=r"mine.txt is a file; name the folder"):
        read_folder(tmp_path / "mine.txt")
    write(tmp_path, [ENVIRONMENT])
    with pytest.raises(DataError, match="holds no answer yet"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"right": None}, "line 3 has no right"),
        ({"seed": "0", "item": 3}, "line 3 has no seed and no item"),
        ({"tiers": [[2]]}, "line 3 has no tiers"),
    ],
)
def test_records_that_lack_something_are_named(tmp_path, change, message):
    given = [answer("bf16", 0, True, 16.0), answer("bf16", 1, True, 16.0) | change]
    with pytest.raises(DataError, match=message):
        read_folder(write(tmp_path, given))


def test_a_page_that_cannot_be_written(folder):
    with pytest.raises(ConfigError, match="is a folder"):
        run_report(folder, folder)
    (folder / "report.md").mkdir()
    with pytest.raises(ConfigError, match=r"report\.md is a folder"):
        run_report(folder, None)
    assert not (folder / "report.html").exists(), "both or none"
