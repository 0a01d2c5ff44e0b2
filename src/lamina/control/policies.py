"""Policies: smoothed signals -> tiers. Pure functions over plain numbers."""

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence

Signal = Mapping[int, float]
"""Bits -> smoothed drift of one layer and side."""


def threshold(signal: Signal, tau: float, tiers: Sequence[int], fallback: int) -> int:
    """Fewest bits whose drift is below tau, else ``fallback`` (EchoKV)."""
    return next((bits for bits in sorted(tiers) if signal[bits] < tau), fallback)


def hysteresis(
    signal: Signal, current: int, tau: float, tiers: Sequence[int], fallback: int, *, calm: bool, demote_below: float
) -> tuple[int, int | None]:
    """Go up at once when the current tier is not below tau; go down only when calm.

    Parameters
    ----------
    signal, current, tau, tiers, fallback
        Smoothed drift, the tier now, the threshold, the tiers to choose from, and what to take if none is below it.
    calm : bool
        Whether a lower tier was below ``demote_below * tau`` long enough, and the current one has been kept long
        enough.
    demote_below : float
        Share of tau that a lower tier must stay under.

    Returns
    -------
    chosen : int
        The tier.
    below : int or None
        Fewest bits below the current tier whose drift is under ``demote_below * tau``, which patience is counted for.
    """
    if current not in signal or not signal[current] < tau:
        return max(threshold(signal, tau, tiers, fallback), current), None
    below = next((b for b in sorted(tiers) if b < current and signal[b] < demote_below * tau), None)
    return (below if below is not None and calm else current), below


def vote(decisions: Sequence[int]) -> int:
    """Majority; ties go to more bits."""
    counts = Counter(decisions)
    return max(counts, key=lambda bits: (counts[bits], bits))


def allocate(signals: Sequence[Signal], sizes: Sequence[float], target: float, tiers: Sequence[int]) -> list[int]:
    """Spend an average of ``target`` bits where they lower the summed drift most.

    Each side of each layer goes up along the lower convex hull of its drift over bits, steepest descent first, so the
    result is the best one for the bits it spends; a step that does not fit is left out and smaller ones are tried.

    Parameters
    ----------
    signals : sequence
        One a side of a layer.
    sizes : sequence of float
        Elements of each, in any unit.
    target : float
        Average bits an element.
    tiers : sequence of int
        Tiers to choose from.

    Returns
    -------
    list of int
        A tier a side of a layer.
    """
    tiers = sorted(tiers)
    chosen = [tiers[0]] * len(signals)
    room = (target - tiers[0]) * sum(sizes)
    queue: list[tuple[float, int, int]] = []

    def offer(i: int) -> None:
        """Queue the steepest step up from where side i is."""
        here = chosen[i]
        steps = [
            (-(signals[i][here] - signals[i][bits]) / ((bits - here) * sizes[i]), i, bits)
            for bits in tiers
            if bits > here and math.isfinite(signals[i][bits])
        ]
        if steps:
            heapq.heappush(queue, min(steps))

    for i in range(len(signals)):
        offer(i)
    while queue:
        gain, i, bits = heapq.heappop(queue)
        if gain >= 0:
            break
        cost = (bits - chosen[i]) * sizes[i]
        if cost > room * (1 + 1e-12):
            smaller = [b for b in tiers if chosen[i] < b < bits]
            if smaller:
                b = smaller[-1]
                drop = signals[i][chosen[i]] - signals[i][b]
                heapq.heappush(queue, (-drop / ((b - chosen[i]) * sizes[i]), i, b))
            continue
        room -= cost
        chosen[i] = bits
        offer(i)
    return chosen
