"""What caches held during an evaluation: tiers that controllers came to, and bytes by kind."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lamina.eval.log import Log, Written
from lamina.eval.summary import BASELINE, is_simulated


@dataclass(frozen=True)
class TierVector:
    """Bits of K and V by packed layer that a controller came to.

    ``when`` is ``warm-up``, ``frozen`` for what all seeds were then measured with, or ``end`` of a seed that was
    answered live; ``seed`` is None where all have the same.
    """

    task: str
    arm: str
    simulated: bool
    when: str
    seed: int | None
    tiers: list[tuple[int, int]]


@dataclass(frozen=True)
class Holding:
    """Bytes of an arm's caches once a task's prompts are answered, means over prompts.

    Attributes
    ----------
    task, arm : str
        Names.
    simulated : bool
        Whether bytes are what a stored cache would take.
    n_bytes : float
        In all.
    by_kind : dict or None
        By kind; None where it was not recorded.
    bf16 : float or None
        The same tokens in bfloat16; None where neither that nor the exact cache's bytes were recorded.
    """

    task: str
    arm: str
    simulated: bool
    n_bytes: float
    by_kind: dict[str, float] | None
    bf16: float | None


def tier_vectors(log: Log | Written) -> list[TierVector]:
    """All that a log tells, by task and arm; an arm without a controller has none."""
    found: list[TierVector] = []
    for (task, arm), records in _by_arm(r for r in log.records if r.get("tiers") is not None):
        answers = [r for r in records if r["kind"] == "answer"]
        simulated = is_simulated(arm, answers)
        found += [
            TierVector(task, arm, simulated, "warm-up", r["seed"], _pairs(r)) for r in records if r["kind"] == "warm-up"
        ]
        last = {r["seed"]: r for r in answers}
        if answers and not any("controller" in r for r in answers):
            found.append(TierVector(task, arm, simulated, "frozen", None, _pairs(answers[-1])))
        else:
            found += [TierVector(task, arm, simulated, "end", seed, _pairs(last[seed])) for seed in sorted(last)]
    return found


def holdings(log: Log | Written) -> list[Holding]:
    """Bytes by task and arm, where they were recorded."""
    arms = _by_arm(r for r in log.of(kind="answer") if r.get("kv_bytes") is not None)
    exact = {
        (task, r["seed"], r["item"]): r["kv_bytes"] for (task, arm), records in arms if arm == BASELINE for r in records
    }
    found = []
    for (task, arm), records in arms:
        references = [r.get("kv_bytes_bf16", exact.get((task, r["seed"], r["item"]))) for r in records]
        known = [x for x in references if x is not None]
        found.append(
            Holding(
                task, arm, is_simulated(arm, records), float(np.mean([r["kv_bytes"] for r in records])),
                _kinds(records), float(np.mean(known)) if len(known) == len(records) else None,
            )
        )  # fmt: skip
    return found


def _kinds(records: list[dict[str, Any]]) -> dict[str, float] | None:
    by_kind = [r.get("kv_bytes_by_kind") for r in records]
    if not all(by_kind):
        return None
    names = dict.fromkeys(name for kinds in by_kind for name in kinds or {})
    return {name: float(np.mean([(kinds or {}).get(name, 0) for kinds in by_kind])) for name in names}


def _pairs(record: dict[str, Any]) -> list[tuple[int, int]]:
    return [(k, v) for k, v in record["tiers"]]


def _by_arm(records: Iterable[dict[str, Any]]) -> list[tuple[tuple[str, str], list[dict[str, Any]]]]:
    """Answers and warm-ups by task and arm, in the order in which they begin."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for r in records:
        if r.get("kind") in ("answer", "warm-up"):
            found.setdefault((r["task"], r["arm"]), []).append(r)
    return list(found.items())
