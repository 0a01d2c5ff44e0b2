"""An evaluation as Markdown: a table a workload."""

from lamina.app.evaluation_reader import Found
from lamina.app.report.evaluation_facts import circumstances, commands, notes, settings_table, title
from lamina.app.report.evaluation_page import workloads
from lamina.app.report.evaluation_tables import fidelity_table


def as_markdown(found: Found) -> str:
    """Scores and bytes of every workload, notes, fidelity, settings, and how to get it again."""
    parts = [f"# {title(found)}", *notes(found)]
    for w in workloads(found):
        parts += [f"## {w.name}", w.table.markdown()]
        if w.orders is not None:
            parts += ["Live controllers over orders of the same prompts:", w.orders.markdown()]
            parts += [f"- {part.desc}" for part in w.order_tiers]
        if w.bytes is not None:
            parts += ["Bytes of the cache after an answer, on average over prompts:", w.bytes.table.markdown()]
    for f in found.fidelity:
        parts += [
            f"## Fidelity: {f.name}",
            f"{f.model} on {f.text}, {f.tokens:,} tokens",
            fidelity_table(f.arms).markdown(),
        ]
    told, typed = circumstances(found), commands(found)
    parts += ["## How it was measured", settings_table(found).markdown()]
    if told is not None:
        parts.append(told.markdown())
    if typed:
        parts.append("\n".join(f"    {line}" for line in typed))
    return "\n\n".join(parts) + "\n"
