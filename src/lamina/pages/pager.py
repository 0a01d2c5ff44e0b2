"""Shedding: under a byte budget, planes are dropped in order of predicted loss (Lamina SPEC 4)."""

import heapq
from collections.abc import Callable
from typing import Any

from lamina.pages.pool import Budget
from lamina.pages.store import LayerStore


class Pager:
    """Frees bytes of a cache's layers by dropping planes.

    Attributes
    ----------
    planes_shed : int
        Planes dropped so far.
    on_shed : callable, optional
        Called with the store's name, the page's first position, the side (0 is K), the bits that are left, and the
        predicted loss, for every plane that is dropped.
    """

    def __init__(self, stores: Callable[[], list[LayerStore]]) -> None:
        self.stores = stores
        self.planes_shed = 0
        self.on_shed: Callable[[str, int, int, int, float], None] | None = None

    def reclaim(self, short: int) -> None:
        """Free at least ``short`` bytes if dropping planes can; least loss first, then the oldest page."""
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
                self.on_shed(stores[i].name, start, side, 4 if left is not None else 2, loss)
            if left is not None:
                heapq.heappush(queue, (left[0], left[1], i, page, side))
        for store in stores:
            store.compact()


def attach_pager(budget: Budget, stores: Callable[[], list[LayerStore]]) -> Pager:
    """Create a pager and let the budget call it when bytes are short."""
    pager = Pager(stores)
    budget.reclaim = pager.reclaim
    return pager
