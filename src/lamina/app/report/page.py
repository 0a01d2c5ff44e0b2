"""The report as one HTML file that needs nothing else: no script, no font, no network."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.app.report.columns import Columns, Series, lay_out_columns
from lamina.app.report.environment import format_figure, template
from lamina.app.report.scatter import lay_out_scatter
from lamina.app.report.stacks import lay_out_stacks
from lamina.app.tables import DEMO_COLUMNS, demo_cells
from lamina.app.values import format_bytes
from lamina.errors import ConfigError

if TYPE_CHECKING:
    from lamina.app.demo import DemoRow


@dataclass(frozen=True)
class Report:
    """What a report shows.

    Attributes
    ----------
    model, title : str
        The model, and what the comparison's figures are of.
    rows : sequence of DemoRow
        The comparison.
    drift : sequence of Series
        Attention drift, one value a layer.
    drift_tokens, drift_queries : int
        Tokens and queries that the drift was measured on.
    environment : sequence of (str, str)
        Versions, device, and what was measured on what.
    notes : sequence of str
        Paragraphs on what the figures mean.
    command : str
        What to type to get them again.
    """

    model: str
    title: str
    rows: Sequence["DemoRow"]
    drift: Sequence[Series]
    drift_tokens: int
    drift_queries: int
    environment: Sequence[tuple[str, str]]
    notes: Sequence[str]
    command: str


def write_report(report: Report, path: Path) -> None:
    """Write the report; ConfigError if the file cannot be written."""
    try:
        path.write_text(render(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}. Choose another file with --report.") from error


def render(report: Report) -> str:
    """The report's HTML, which is well-formed XML as well."""
    rows = report.rows
    totals = [f"{format_bytes(row.kv_bytes)}, {row.kv_bytes / row.kv_bytes_bf16:.0%} of bf16" for row in rows]
    columns = lay_out_columns(report.drift)
    return template("report.html.j2").render(
        report=report,
        cells={"header": ("arm", *DEMO_COLUMNS), "rows": [demo_cells(row) for row in rows]},
        scatter=lay_out_scatter([(row.name, row.bits, row.kl_mean) for row in rows]),
        scatter_desc="; ".join(f"{r.name}: {format_figure(r.bits)} bits, KL {format_figure(r.kl_mean)}" for r in rows),
        stacks=lay_out_stacks([(r.name, r.bytes_by_kind) for r in rows], max(r.kv_bytes_bf16 for r in rows)),
        stacks_desc="; ".join(f"{row.name}: {total}" for row, total in zip(rows, totals)),
        totals=totals,
        columns=columns,
        drift_descs=[_drift_desc(picture, series) for picture, series in zip(columns, report.drift)],
        drift_rows=list(zip(*(series.values for series in report.drift))),
    )


def _drift_desc(picture: Columns, series: Series) -> str:
    known = [(value, column.layer) for value, column in zip(series.values, picture.columns) if not column.missing]
    if not known:
        return "no layer is packed"
    (low, lowest), (high, highest) = min(known), max(known)
    return (
        f"one column a layer, {len(known)} layers, from {format_figure(low)} in layer {lowest} "
        f"to {format_figure(high)} in layer {highest}"
    )
