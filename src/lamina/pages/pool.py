"""Pools of equal slots, and the byte budget that all pools of a cache share."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from lamina.errors import MemoryBudgetError

GROWTH = 1 / 32
ALL_RANKS = 3


class Budget:
    """Bytes allocated by the pools of one cache, with an optional limit.

    Parameters
    ----------
    max_bytes : int or None
        Upper bound on allocated bytes; None for no bound. A pool that grows is copied, so for that moment its old
        and new storage (one layer's share) exist side by side.

    Attributes
    ----------
    reclaim : callable or None
        Called with the number of bytes that are short, and the ranks of exact rows that may go; frees what it can.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.used = 0
        self.reclaim: Callable[[int, int], None] | None = None

    def ensure(self, need: Callable[[], int], *, ranks: int = ALL_RANKS) -> None:
        """Make room for ``need()`` more bytes, shedding if that helps, or raise MemoryBudgetError.

        Exact rows go last, and only those of the first ``ranks`` ranks (roll-back, recent, first tokens).
        """
        if self.max_bytes is None or need() <= 0:
            return
        short = self.used + need() - self.max_bytes
        # Reclaiming gives free slots back too, which changes the need: look again until nothing more can be freed.
        before = self.used + 1
        while short > 0 and self.reclaim is not None and self.used < before:
            before = self.used
            self.reclaim(short, ranks)
            short = self.used + need() - self.max_bytes
        if short > 0:
            raise MemoryBudgetError(
                f"max_bytes={self.max_bytes:,} is too small: {self.max_bytes + short:,} bytes are needed now and every "
                "plane and exact row that may be shed is gone; raise max_bytes, or use fewer tokens, sequences or bits"
            )


@dataclass(frozen=True)
class Field:
    """One tensor of a pool: shape of a slot, dtype, device, and whether new slots hold zeros."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device | str
    zeroed: bool = False

    @property
    def n_bytes(self) -> int:
        """Bytes of a slot."""
        return math.prod(self.shape) * self.dtype.itemsize


class Pool:
    """Growable tensors of equal slots that share their slot numbers, with a free list.

    Parameters
    ----------
    budget : Budget
        Where the bytes are accounted.
    *fields : Field
        One a tensor.

    Attributes
    ----------
    data : list of Tensor
        ``[slots, *shape]``, one a field.
    """

    def __init__(self, budget: Budget, *fields: Field) -> None:
        # Storage outlives the call that makes it, which may run in inference mode.
        with torch.inference_mode(False):
            self.data = [torch.empty((0, *f.shape), dtype=f.dtype, device=f.device) for f in fields]
        self.fields = fields
        self.slot_bytes = sum(f.n_bytes for f in fields)
        self.budget = budget
        self.free: list[int] = []

    @property
    def slots(self) -> int:
        """Slots of the storage."""
        return self.data[0].shape[0]

    @property
    def n_bytes(self) -> int:
        """Bytes of the storage."""
        return sum(t.untyped_storage().nbytes() for t in self.data)

    def missing_bytes(self, n: int) -> int:
        """Bytes that must be allocated before n more slots can be handed out."""
        return max(0, n - len(self.free)) * self.slot_bytes

    def reserve(self, n: int) -> None:
        """Grow until n slots are free; the caller has made room in the budget."""
        short = n - len(self.free)
        if short <= 0:
            return
        size = self.slots
        extra = max(short, int(size * GROWTH)) if self.budget.max_bytes is None else short
        self._resize(size + extra)
        self.free = [*range(size + extra - 1, size - 1, -1), *self.free]

    def allocate(self) -> int:
        """Hand out a reserved slot; its content is undefined."""
        return self.free.pop()

    def release(self, slots: Iterable[int]) -> None:
        """Take slots back."""
        self.free.extend(slots)

    def shrink(self) -> dict[int, int]:
        """Give free slots back: move the highest slots down and cut the storage.

        Returns
        -------
        dict
            Old slot -> new slot, for every slot that moved.
        """
        if not self.free:
            return {}
        free = set(self.free)
        keep = self.slots - len(free)
        holes = sorted(s for s in free if s < keep)
        movers = [s for s in range(keep, self.slots) if s not in free]
        for t in self.data:
            if movers:
                t[holes] = t[movers]
        self._resize(keep)
        self.free = []
        return dict(zip(movers, holes))

    def _resize(self, n: int) -> None:
        before = self.n_bytes
        for i, (field, old) in enumerate(zip(self.fields, self.data)):
            with torch.inference_mode(False):
                new = (old.new_zeros if field.zeroed else old.new_empty)((n, *old.shape[1:]))
            kept = min(n, old.shape[0])
            new[:kept] = old[:kept]
            self.data[i] = new
        self.budget.used += self.n_bytes - before
