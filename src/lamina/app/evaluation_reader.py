"""What ``lamina evaluate`` and ``lamina fidelity --json`` left in a folder."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamina.errors import DataError
from lamina.eval.held import Holding, TierVector, holdings, tier_vectors
from lamina.eval.log import Written, read_log
from lamina.eval.orders import OrderSpread, order_spreads
from lamina.eval.summary import Score, summarise

LOG, SUMMARY = "answers.jsonl", "summary.json"
FIELDS: dict[str, dict[str, type]] = {
    "answer": {"task": str, "arm": str, "seed": int, "item": str, "right": bool},
    "reordered": {"task": str, "arm": str, "seed": int, "item": str, "right": bool, "order": int, "tiers": list},
    "warm-up": {"task": str, "arm": str, "seed": int, "tiers": list},
}


@dataclass(frozen=True)
class RunFound:
    """One run of ``lamina evaluate``.

    Attributes
    ----------
    name : str
        Its folder, as seen from the one that was asked for; empty for that one itself.
    settings : dict
        What all its answers were given with.
    scores, tiers, holdings, orders
        What its answers say.
    environments : list of dict
        Where they were given, one a command; empty for runs that did not record it.
    notes : list of str
        What a reader should know.
    """

    name: str
    settings: dict[str, Any]
    scores: list[Score]
    tiers: list[TierVector]
    holdings: list[Holding]
    orders: list[OrderSpread]
    environments: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)

    @property
    def packed(self) -> list[int] | None:
        """Numbers of the packed layers, if they were recorded."""
        found = self.environments[-1].get("packed") if self.environments else None
        return found if isinstance(found, list) else None


@dataclass(frozen=True)
class FidelityFound:
    """A document of ``lamina fidelity --json``.

    An arm may hold ``kl_by_position`` besides, pairs of a first position and the mean KL from there to the next, and
    ``kl_by_layer``, the mean KL of each layer's attention weights.
    """

    name: str
    model: str
    text: str
    tokens: int
    arms: list[dict[str, Any]]


@dataclass(frozen=True)
class Found:
    """All that a folder holds; ``not_read`` names JSON files of other kinds."""

    folder: Path
    runs: list[RunFound]
    fidelity: list[FidelityFound]
    not_read: list[str]


def read_folder(folder: Path) -> Found:
    """Read a folder and those in it; nothing is changed.

    Raises
    ------
    DataError
        There is no such folder, it holds no run with an answer, or a log is damaged.
    """
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {kind}; name the folder that `lamina evaluate` wrote with -o")
    try:
        files = sorted(f for f in (*folder.glob("*.json*"), *folder.glob("*/*.json*")) if f.is_file())
    except OSError as error:
        raise DataError(f"cannot read {folder}: {error}") from error
    logs = [f for f in files if f.name == LOG]
    if not logs:
        held = ", ".join(sorted(f.name for f in folder.iterdir())[:5])
        raise DataError(
            f"{folder} and the folders in it hold no {LOG} ({held or 'nothing at all'}); name the folder that "
            "`lamina evaluate` wrote with -o"
        )
    runs = [_read_run(folder, log) for log in logs]
    if not any(run.scores for run in runs):
        raise DataError(f"{folder} holds no answer yet; let `lamina evaluate` go on first")
    fidelity, not_read = [], []
    for file in files:
        if file.name in (LOG, SUMMARY):
            continue
        name = str(file.relative_to(folder))
        document = _fidelity(name, _json(file))
        if document is None:
            not_read.append(name)
        else:
            fidelity.append(document)
    return Found(folder, [run for run in runs if run.scores], fidelity, not_read)


def _read_run(folder: Path, path: Path) -> RunFound:
    log = read_log(path)
    for number, record in enumerate(log.records, 2):
        _check(path, number, record)
    scores = summarise(log)
    name = "" if path.parent == folder else path.parent.name
    notes = list(_notes(log, scores, _json(path.parent / SUMMARY)))
    return RunFound(
        name, log.settings, scores, tier_vectors(log), holdings(log), order_spreads(log), _environments(log), notes
    )


def _check(path: Path, number: int, record: dict[str, Any]) -> None:
    """Raise DataError for a record that lacks what it is for; kinds that are not known are left alone."""
    wanted = FIELDS.get(str(record.get("kind")), {})
    wrong = [name for name, kind in wanted.items() if not isinstance(record.get(name), kind)]
    tiers = record.get("tiers")
    if wanted and tiers is not None and not _are_pairs(tiers):
        wrong.append("tiers")
    if wrong:
        raise DataError(
            f"{path} line {number} has no {' and no '.join(wrong)} as `lamina evaluate` writes it; delete the line and "
            "run `lamina evaluate` again"
        )


def _are_pairs(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(bits, int) for bits in pair) for pair in value
    )


def _environments(log: Written) -> list[dict[str, Any]]:
    """Those that answers or warm-ups follow."""
    following = zip(log.records, [*log.records[1:], {}])
    return [r for r, after in following if r.get("kind") == "environment" and after.get("kind") in FIELDS]


def _notes(log: Written, scores: list[Score], summary: Any) -> list[str]:
    """What a reader should know of a run."""
    found = []
    if log.cut:
        found.append(f"The last line of {LOG} is cut short and was left out: the run goes on, or was interrupted.")
    answers = log.of(kind="answer")
    keys = {(r["task"], r["arm"], r["seed"], r["item"]) for r in answers}
    if len(keys) < len(answers):
        found.append(f"{len(answers) - len(keys)} answers are there twice; the later one counts.")
    told = summary.get("scores") if isinstance(summary, dict) else None
    if isinstance(told, list) and [_gist(s) for s in told] != [(s.task, s.arm, s.n) for s in scores]:
        found.append(f"{SUMMARY} is older than {LOG}; figures here are those of the answers.")
    if len({s.n for s in scores}) > 1:
        found.append("Some arms have answered fewer prompts than others: the run has not finished.")
    return found


def _gist(score: Any) -> tuple[Any, ...]:
    return tuple(score.get(name) for name in ("task", "arm", "n")) if isinstance(score, dict) else ()


def _json(file: Path) -> Any:
    """The document in a file; None if it holds none."""
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None


def _fidelity(name: str, document: Any) -> FidelityFound | None:
    """A document of ``lamina fidelity``; None for another kind."""
    if not isinstance(document, dict) or not isinstance(document.get("arms"), list):
        return None
    arms = document["arms"]
    if not arms or not all(isinstance(a, dict) and isinstance(a.get("name"), str) and "kl_mean" in a for a in arms):
        return None
    return FidelityFound(
        name, str(document.get("model", "")), str(document.get("text", "")), int(document.get("tokens") or 0), arms
    )
