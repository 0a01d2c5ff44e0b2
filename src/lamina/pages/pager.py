"""Shedding: under a byte budget, planes are dropped in order of predicted loss (Lamina SPEC 4), then exact rows."""

import heapq
from collections.abc import Callable
from typing import Any

from lamina.pages.pool import Budget
from lamina.pages.store import LayerStore


class Pager:
    """Frees bytes of a cache's layers by dropping planes, and exact rows of closed pages when none are left.

    Attributes
    ----------
    planes_shed, exact_shed : int
        Planes, and exact rows of whole pages, dropped so far.
    on_shed : callable, optional
        Called with the store's name, the page's first position, what was dropped (``"k"``, ``"v"``, ``"exact"``), the
        bits that are left of that side (of K and V for exact rows), and the predicted loss of a plane.
    """

    def __init__(self, stores: Callable[[], list[LayerStore]]) -> None:
        self.stores = stores
        self.planes_shed = self.exact_shed = 0
        self.on_shed: Callable[[str, int, str, int | tuple[int, int], float | None], None] | None = None

    def reclaim(self, short: int, ranks: int) -> None:
        """Free at least ``short`` bytes if dropping can: planes of least loss and of the oldest page, then exact rows.

        Exact rows go by rank: those kept for rolling back alone, recent ones, those of the first tokens; the oldest
        first. Only so many ``ranks`` may go.
        """
        stores = self.stores()
        spare = sum(len(pool.free) * pool.slot_bytes for s in stores for pool in s.arena.pools)
        queue: list[Any] = []
        if spare < short:
            queue = [
                (loss, start, i, page, side)
                for i, s in enumerate(stores)
                for loss, start, page, side in s.arena.shed_candidates()
            ]
            heapq.heapify(queue)
        while spare < short and queue:
            loss, start, i, page, side = heapq.heappop(queue)
            spare += stores[i].arena.shed(page, side)
            self.planes_shed += 1
            left = stores[i].arena.shed_candidate(page, side)
            if self.on_shed is not None:
                self.on_shed(stores[i].name, start, "kv"[side], 4 if left is not None else 2, loss)
            if left is not None:
                heapq.heappush(queue, (left[0], left[1], i, page, side))
        if spare < short and ranks:
            rows = sorted((*x, i) for i, s in enumerate(stores) for x in s.exact_candidates() if x[0] < ranks)
            for _, start, page, i in rows:
                if spare >= short:
                    break
                spare += stores[i].shed_exact(page)
                self.exact_shed += 1
                if self.on_shed is not None:
                    self.on_shed(stores[i].name, start, "exact", stores[i].arena.bits_read(page), None)
        for store in stores:
            store.compact()


def attach_pager(budget: Budget, stores: Callable[[], list[LayerStore]]) -> Pager:
    """Create a pager and let the budget call it when bytes are short."""
    pager = Pager(stores)
    budget.reclaim = pager.reclaim
    return pager
