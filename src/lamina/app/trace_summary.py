"""A trace in numbers."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lamina.app.trace_reader import Pairs, Run, average_bits, decisions

SIDES = ("k", "v")


@dataclass(frozen=True)
class Changes:
    """How often a layer's side went to more bits, and to fewer."""

    up: int
    down: int


@dataclass(frozen=True)
class Summary:
    """What happened in a run; a figure that the trace does not tell is None.

    Attributes
    ----------
    firings, pages_closed : int
        Decisions, and pages encoded.
    planes_shed, changes : dict
        Planes dropped, and tier changes of all layers, by side (``k``, ``v``).
    exact_shed : int
        Pages that lost their exact rows.
    layer_changes : list of (Changes, Changes)
        Tier changes of K and V, one pair a packed layer.
    final_tiers : list of (int, int)
        As last decided, one pair a packed layer.
    decided_bits : float
        Average of the final tiers, weighted by the layers' sizes.
    bits_history, bits_at_context, final_bytes, bf16_bytes
        As last told.
    """

    firings: int
    pages_closed: int
    planes_shed: dict[str, int]
    exact_shed: int
    changes: dict[str, Changes]
    layer_changes: list[tuple[Changes, Changes]]
    final_tiers: Pairs
    decided_bits: float
    bits_history: float | None
    bits_at_context: float | None
    final_bytes: int | None
    bf16_bytes: float | None


def summarise(run: Run) -> Summary:
    """Count what happened."""
    moves = [[[0, 0], [0, 0]] for _ in run.start.layers]
    final = run.start.tiers
    for before, final in pairwise(decisions(run)):
        for move, old, new in zip(moves, before, final):
            for side in (0, 1):
                move[side][0] += new[side] > old[side]
                move[side][1] += new[side] < old[side]
    by_layer = [(Changes(*k), Changes(*v)) for k, v in moves]
    memory = run.memory[-1] if run.memory else None
    return Summary(
        firings=len(run.firings),
        pages_closed=run.closed,
        planes_shed={side: run.shed[side] for side in SIDES},
        exact_shed=run.shed["exact"],
        changes={
            name: Changes(sum(pair[side].up for pair in by_layer), sum(pair[side].down for pair in by_layer))
            for side, name in enumerate(SIDES)
        },
        layer_changes=by_layer,
        final_tiers=final,
        decided_bits=average_bits(final, run.start.sizes),
        bits_history=memory.bits_history if memory else None,
        bits_at_context=memory.bits_at_context if memory else None,
        final_bytes=memory.n_bytes if memory else None,
        bf16_bytes=memory.bf16_bytes if memory else None,
    )


def as_json(run: Run, summary: Summary) -> dict[str, Any]:
    """The document that ``lamina trace --json`` writes."""
    shed, bf16 = summary.planes_shed, summary.bf16_bytes
    return {
        "model": run.start.model,
        "complete": run.ended,
        "tokens": run.context,
        "firings": summary.firings,
        "pages_closed": summary.pages_closed,
        "planes_shed": {**shed, "total": sum(shed.values())},
        "exact_shed": summary.exact_shed,
        "changes": {side: {"up": found.up, "down": found.down} for side, found in summary.changes.items()},
        "final_tiers": {str(layer): list(pair) for layer, pair in zip(run.start.layers, summary.final_tiers)},
        "decided_bits": summary.decided_bits,
        "bits_history": summary.bits_history,
        "bits_at_context": summary.bits_at_context,
        "final_bytes": summary.final_bytes,
        "bf16_bytes": None if bf16 is None else round(bf16),
    }
