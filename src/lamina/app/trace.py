"""What ``lamina trace`` does: a trace becomes a page, or a summary."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.app.report.trace_page import render_trace
from lamina.app.trace_reader import read_trace
from lamina.app.trace_summary import as_json, summarise
from lamina.errors import ConfigError


@dataclass(frozen=True)
class TraceRequest:
    """Which trace to draw; fields are the options of ``lamina trace``."""

    file: Path
    output: Path | None = None
    layers: str | None = None


def run_trace(request: TraceRequest) -> Path:
    """Write the page; returns its file."""
    if not request.file.name:
        raise ConfigError(f"{request.file} is a folder; name a trace")
    output = request.output or request.file.with_suffix(".html")
    if output.resolve() == request.file.resolve():
        raise ConfigError(f"the page would replace the trace {request.file}; choose another file with -o")
    run = read_trace(request.file)
    layers = None if request.layers is None else parse_layers(request.layers, run.start.layers)
    try:
        output.write_text(render_trace(run, layers), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error}. Choose another file with -o.") from error
    return output


def summarise_trace(file: Path) -> dict[str, Any]:
    """The document that ``--json`` writes."""
    run = read_trace(file)
    return as_json(run, summarise(run))


def parse_layers(text: str, packed: list[int]) -> list[int]:
    """Layer numbers from ``0,7,29``, in this order; ConfigError unless all of them are packed."""
    found = [part.strip() for part in text.split(",")]
    wrong = [part for part in found if not part.isdecimal() or int(part) not in packed]
    if wrong:
        raise ConfigError(f"--layers {text!r}: {wrong[0]!r} is none of the packed layers {', '.join(map(str, packed))}")
    return list(dict.fromkeys(map(int, found)))
