"""What an evaluation says in words: settings, circumstances, how to do it again, and what to know."""

import shlex
from pathlib import PurePath
from typing import Any

from lamina.app.evaluation_reader import Found, RunFound
from lamina.app.report.evaluation_tables import NONE, Table

NOT_RECORDED = "not recorded"
UNSHOWN = ("kind", "command", "packed", "layers")


def title(found: Found) -> str:
    """What the page is about."""
    models = dict.fromkeys(PurePath(str(run.settings.get("model", ""))).name for run in found.runs)
    return f"Evaluation of {', '.join(name for name in models if name) or 'a model'}"


def run_name(run: RunFound) -> str:
    """What a run is called beside others."""
    return run.name or "this folder"


def settings_table(found: Found) -> Table:
    """A row a setting, a column a run; settings that differ say so."""
    names = list(dict.fromkeys(name for run in found.runs for name in run.settings))
    several = len(found.runs) > 1
    rows = []
    for name in names:
        values = [_text(run.settings.get(name)) for run in found.runs]
        rows.append((name + (" (differs)" if len(set(values)) > 1 else ""), *values))
    return Table(("setting", *([run_name(run) for run in found.runs] if several else ["value"])), rows)


def notes(found: Found) -> list[str]:
    """What to know before reading on."""
    several = len(found.runs) > 1
    prefix = {run.name: f"{run_name(run)}: " if several else "" for run in found.runs}
    said = [prefix[run.name] + note for run in found.runs for note in run.notes]
    if several:
        said.append(f"{len(found.runs)} runs are shown; arms are compared within a run, never across two.")
    if found.not_read:
        shown = ", ".join(found.not_read[:8]) + (", ..." if len(found.not_read) > 8 else "")
        said.append(f"Other JSON files were not read: {shown}.")
    return said


def circumstances(found: Found) -> Table | None:
    """A row a fact, a column for every command that answered something; None if no run recorded any."""
    told = [(run, record) for run in found.runs for record in run.environments]
    if not told:
        return None
    names = list(dict.fromkeys(name for _, record in told for name in record if name not in UNSHOWN))
    rows = [(name, *(_text(record.get(name)) for _, record in told)) for name in names]
    rows.append(("packed layers", *(_layers(record) for _, record in told)))
    heads = [f"{run_name(run)}, command {run.environments.index(record) + 1}" for run, record in told]
    return Table(("", *(heads if len(told) > 1 else ["value"])), rows)


def commands(found: Found) -> list[str]:
    """What to type to get the answers and this page again; nothing if how they were got was not recorded."""
    typed = dict.fromkeys(str(r["command"]) for run in found.runs for r in run.environments if r.get("command"))
    return [*typed, shlex.join(["lamina", "report", str(found.folder)])] if typed else []


def _layers(record: dict[str, Any]) -> str:
    packed, layers = record.get("packed"), record.get("layers")
    return f"{len(packed)} of {layers}" if isinstance(packed, list) and layers is not None else NOT_RECORDED


def _text(value: Any) -> str:
    if value is None:
        return NOT_RECORDED
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value) or NONE
