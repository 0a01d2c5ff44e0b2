"""What ``lamina report`` does: answers of an evaluation become a page and a Markdown table."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lamina.app.evaluation_reader import LOG, Found, read_folder
from lamina.app.output import check_output
from lamina.app.report.evaluation_markdown import as_markdown
from lamina.app.report.evaluation_page import render_evaluation
from lamina.app.report.evaluation_tables import verdict
from lamina.errors import ConfigError

EVALUATED = (LOG, "summary.json", "summary.md")
"""Files of ``lamina evaluate``, which a report leaves alone."""


@dataclass(frozen=True)
class Written:
    """Files that were written, and the table."""

    page: Path
    table: Path
    markdown: str


def run_report(folder: Path, output: Path | None) -> Written:
    """Write the page, by default into the folder, and the table beside it."""
    page = output or folder / "report.html"
    table = page.with_suffix(".md")
    found = read_folder(folder)
    if page == table:
        raise ConfigError(f"{page} is where the Markdown table goes; choose another file with -o, such as report.html")
    for file in (page, table):
        check_output(file, "-o", "report.html")
        if file.name in EVALUATED and (file.parent / LOG).exists():
            raise ConfigError(f"{file} belongs to the evaluation itself; choose another file with -o")
    markdown = as_markdown(found)
    for file, text in ((page, render_evaluation(found)), (table, markdown)):
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error}. Choose another file with -o.") from error
    return Written(page, table, markdown)


def report_document(folder: Path) -> dict[str, Any]:
    """The document that ``--json`` writes."""
    return as_document(read_folder(folder))


def as_document(found: Found) -> dict[str, Any]:
    """All that a folder says, each comparison with its verdict."""
    runs = []
    for run in found.runs:
        document = asdict(run)
        for score, told in zip(run.scores, document["scores"], strict=True):
            if score.against is not None:
                told["against"]["verdict"] = verdict(score.against)
        runs.append(document)
    return {
        "folder": str(found.folder),
        "runs": runs,
        "fidelity": [asdict(f) for f in found.fidelity],
        "not_read": found.not_read,
    }
