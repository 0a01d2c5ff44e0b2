"""Studies and stages as tables for people."""

from pathlib import Path

from rich.table import Table
from rich.text import Text

from lamina.app.ablate import AblationReport, Measured, StagesReport
from lamina.app.tables import figures_table
from lamina.eval.ablation import StudyResult
from lamina.eval.stages import STAGES, ArmStages, Stages

SIMULATED = "* simulated: rows are quantised and dequantised again, not stored"
COLUMNS = ("bits", "KL", "95 %", "more KL", "95 % of that", "top-1", "what")


def ablation_tables(report: AblationReport) -> list[Table | str]:
    """One table a study, and a line for whatever was left out."""
    tables: list[Table | str] = [_study_table(result, report.on) for result in report.studies]
    return tables + [f"left out: {reason}" for reason in report.left_out]


def stages_tables(report: StagesReport) -> list[Table | str]:
    """The arms' averages over layers, then one table an arm."""
    first = figures_table(f"Relative errors, average over layers; {_on(report.on)}", "arm", _STAGE_HEADS)
    for arm in report.arms:
        first.add_row(arm.name + "*" * arm.simulated, *_cells(arm.mean))
    first.caption = (
        "rows read from codes; logits less each query's mean; attention output; these are each layer's own. "
        "The hidden state after a layer carries the errors of all layers up to it. At the last page's tokens."
    ) + ("\n" + SIMULATED if any(arm.simulated for arm in report.arms) else "")
    return [first, *(_layers_table(arm) for arm in report.arms)]


_STAGE_HEADS = ("K rows", "V rows", "logits", "output", "hidden")


def _study_table(result: StudyResult, on: Measured) -> Table:
    table = figures_table(f"{result.study.name}: {result.study.what}; {_on(on)}", "arm", COLUMNS[:-1])
    table.add_column(COLUMNS[-1])
    for f in result.findings:
        base = f.arm == result.against
        table.add_row(
            f.arm + "*" * f.simulated,
            f"{f.bits_history:.2f}" if f.bits_history == f.bits_history else "-",
            _nats(f.kl),
            f"{_nats(f.kl_low)} to {_nats(f.kl_high)}",
            "-" if base else _nats(f.more, "+"),
            "-" if base else f"{_nats(f.more_low, '+')} to {_nats(f.more_high, '+')}",
            f"{f.top1:.1%}",
            Text(f.what),
            style="bold" if base else "",
        )
    lines = [f"mean KL in nats; more KL than `{result.against}`, on the same tokens", result.study.note]
    if any(f.simulated for f in result.findings):
        lines.append(SIMULATED)
    table.caption = Text("\n".join(line for line in lines if line))
    return table


def _layers_table(arm: ArmStages) -> Table:
    table = figures_table(f"{arm.name}{' (simulated)' if arm.simulated else ''}, by layer", "layer", _STAGE_HEADS)
    for i, stages in enumerate(arm.layers):
        table.add_row(str(i), *_cells(stages))
    return table


def _cells(stages: Stages) -> list[str]:
    return [f"{x:.4f}" if (x := getattr(stages, name)) == x else "-" for name in STAGES]


def _nats(x: float, sign: str = "") -> str:
    return format(x, f"{sign}.4f" if abs(x) >= 1e-4 or not x else f"{sign}.0e")


def _on(on: Measured) -> str:
    return f"{on.tokens:,} tokens of {Path(on.text).name}, S={on.window.sink}, R={on.window.recent}"
