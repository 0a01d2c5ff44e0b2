"""What a finished run says: accuracy against bits, arm by arm, each compared with the exact cache."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lamina.eval.arms import ARMS
from lamina.eval.log import Log, Written
from lamina.eval.statistics import Comparison, Interval, compare, interval, proportion
from lamina.json_values import finite

BASELINE = "bf16"


@dataclass(frozen=True)
class Score:
    """One arm on one task, over all seeds.

    Attributes
    ----------
    task, arm : str
        Names.
    n : int
        Answers.
    accuracy : Interval
        Share of right ones, with Wilson's interval.
    by_seed : list of float
        The same for every seed.
    bits, bits_at_context : float or None
        Bits an element of packed tokens, and of everything, averaged over prompts; None where nothing was packed.
    tiers : list of (int, int) or None
        Of the last answer, K and V by packed layer, of an arm with a controller.
    against : Comparison or None
        With the exact cache, if that was run.
    simulated : bool
        Whether the arm was simulated instead of stored.
    bits_interval, context_interval : Interval or None
        ``bits`` and ``bits_at_context`` with bootstrap intervals over prompts.
    """

    task: str
    arm: str
    n: int
    accuracy: Interval
    by_seed: list[float]
    bits: float | None
    bits_at_context: float | None
    tiers: list[tuple[int, int]] | None
    against: Comparison | None
    simulated: bool = False
    bits_interval: Interval | None = None
    context_interval: Interval | None = None


def summarise(log: Log | Written) -> list[Score]:
    """Scores of everything in a log; an arm is compared once it has answered what the exact cache has."""
    answers: dict[str, dict[str, dict[tuple[int, str], dict[str, Any]]]] = {}
    for r in log.of(kind="answer"):
        answers.setdefault(r["task"], {}).setdefault(r["arm"], {})[r["seed"], r["item"]] = r
    found = []
    for task, arms in answers.items():
        base = arms.get(BASELINE, {})
        paired = {
            name: [bool(given[key]["right"]) for key in base]
            for name, given in arms.items()
            if name != BASELINE and given.keys() == base.keys()
        }
        compared = compare([bool(r["right"]) for r in base.values()], paired) if base else {}
        found += [_score(task, name, list(given.values()), compared.get(name)) for name, given in arms.items()]
    return found


def _score(task: str, arm: str, records: Sequence[dict[str, Any]], against: Comparison | None) -> Score:
    right = [float(r["right"]) for r in records]
    seeds = sorted({r["seed"] for r in records})
    by_seed = [float(np.mean([x for x, r in zip(right, records) if r["seed"] == seed])) for seed in seeds]
    tiers = records[-1].get("tiers")
    bits, context = _interval(records, "bits_history"), _interval(records, "bits_at_context")
    return Score(
        task, arm, len(records), proportion(right), by_seed, _middle(bits), _middle(context),
        [(k, v) for k, v in tiers] if tiers else None, against, is_simulated(arm, records), bits, context,
    )  # fmt: skip


def is_simulated(arm: str, records: Sequence[dict[str, Any]]) -> bool:
    """Whether records say so; of those that do not tell, whether the arm of this name is."""
    told = [r["simulated"] for r in records if "simulated" in r]
    return any(told) if told else arm in ARMS and ARMS[arm].simulated


def _interval(records: Sequence[dict[str, Any]], field: str) -> Interval | None:
    known = [r[field] for r in records if r.get(field) is not None]
    return interval(known) if known else None


def _middle(x: Interval | None) -> float | None:
    return None if x is None else x.mean


def as_json(scores: Sequence[Score], settings: dict[str, Any], spreads: Sequence[Any] = ()) -> dict[str, Any]:
    """The aggregate document of a run; ``spreads`` are those of :mod:`lamina.eval.orders`."""
    document: dict[str, Any] = finite(
        {"settings": settings, "scores": [asdict(s) for s in scores], "orders": [asdict(s) for s in spreads]}
    )
    return document


def as_markdown(scores: Sequence[Score]) -> str:
    """A table a task."""
    parts = []
    for task in dict.fromkeys(s.task for s in scores):
        rows = [s for s in scores if s.task == task]
        head = ("arm", "bits", "at this context", "right", "95 %", "against bf16")
        lines = [f"**{task}**", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for s in rows:
            verdict = s.against.verdict() if s.against is not None else ""
            band = f"{s.accuracy.low:.1%} to {s.accuracy.high:.1%}"
            right = f"{s.accuracy.mean:.1%} of {s.n}"
            cells = (shown_name(s.arm, s.simulated), _figure(s.bits), _figure(s.bits_at_context), right, band, verdict)
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def shown_name(arm: str, simulated: bool) -> str:
    """An arm's name, which says so if it is simulated."""
    return f"{arm} (simulated)" if simulated else arm


def _figure(x: float | None) -> str:
    return f"{x:.2f}" if x is not None else "–"
