"""The storage of one layer's pages: records, planes, exact rows and the page table. Knows pages, not sequences."""

from collections.abc import Callable

import torch
from torch import Tensor

from lamina.codec import PAGE_TOKENS
from lamina.codec.packing import SLABS_OF_BITS
from lamina.pages.ids import Tell, tell
from lamina.pages.layout import RecordLayout
from lamina.pages.pool import ALL_RANKS, Budget, Field, Pool
from lamina.pages.table import COLUMNS, EXACT, FINE, FINEST, ROWS, START, TIER, new_row, read_bits, shed_costs

MOST_WAITING = 32
"""Predictions of losses that wait to be asked for."""
USERS, HOLDERS = 0, 1
"""Columns of the counts: sequences that a page belongs to, and those of them that still need its exact rows."""


class Arena:
    """Pages of one layer; sequences share them by count.

    Parameters
    ----------
    layout : RecordLayout
        Of a closed page.
    dtype, device
        Of the engine's rows.
    budget : Budget
        Where the bytes are accounted.
    mirrored : bool, optional
        Whether the device has a page table of its own; by default unless it is the CPU.

    Attributes
    ----------
    changed : set of int
        Pages whose rows of the table the device has not been told of.
    """

    def __init__(
        self,
        layout: RecordLayout,
        dtype: torch.dtype,
        device: torch.device | str,
        budget: Budget,
        mirrored: bool | None = None,
    ) -> None:
        h, d = layout.n_heads, layout.head_dim
        self.layout, self.budget, self.dtype, self.device = layout, budget, dtype, torch.device(device)
        self.mirrored = self.device.type != "cpu" if mirrored is None else mirrored
        self.changed: set[int] = set()
        self._losses: list[tuple[list[int], Callable[[], Tensor]]] = []
        self.pages = Pool(
            budget,
            Field((layout.record_bytes,), torch.uint8, device),
            Field((COLUMNS,), torch.int32, "cpu"),
            Field((2, 2), torch.float32, device),
            Field((2,), torch.int32, "cpu", zeroed=True),
            *[Field((COLUMNS,), torch.int32, device)] * self.mirrored,
        )
        self.slabs = Pool(budget, Field((h, PAGE_TOKENS, d // 4), torch.uint8, device))
        self.exact = Pool(budget, Field((2, h, PAGE_TOKENS, d), dtype, device))

    @property
    def pools(self) -> tuple[Pool, Pool, Pool]:
        """All storage."""
        return self.pages, self.slabs, self.exact

    @property
    def table(self) -> Tensor:
        """Page table, int32 ``[N, 11]`` on the CPU, see :mod:`lamina.pages.table`."""
        return self.pages.data[1]

    @property
    def loss(self) -> Tensor:
        """Predicted loss of reading a page's K or V at 2 or at 4 bits, float32 ``[N, 2, 2]``."""
        self._settle_losses()
        return self.pages.data[2]

    @property
    def counts(self) -> Tensor:
        """int32 ``[N, 2]`` on the CPU: users and holders of every page, 0 where a page is free."""
        return self.pages.data[3]

    def cell(self, page: int, column: int) -> int:
        """One number of the page table."""
        return int(self.table[page, column])

    def users(self, page: int) -> int:
        """Sequences that a page belongs to."""
        return int(self.counts[page, USERS])

    def bits_read(self, page: int) -> tuple[int, int]:
        """Bits that K and V of a closed page are read at."""
        row = self.table[page, None]
        return int(read_bits(row, 0)), int(read_bits(row, 1))

    def reserve(self, pages: int, slabs: int, exact: int, other: int = 0, *, ranks: int = ALL_RANKS) -> None:
        """Make sure that so many slots can be handed out, and that ``other`` bytes fit the budget besides.

        ``ranks``: how many ranks of exact rows may be shed for that.
        """
        self.budget.ensure(lambda: self.missing_bytes(pages, slabs, exact, other), ranks=ranks)
        for pool, n in zip(self.pools, (pages, slabs, exact)):
            pool.reserve(n)

    def missing_bytes(self, pages: int, slabs: int, exact: int, other: int = 0) -> int:
        """Bytes that :meth:`reserve` would allocate now, ``other`` included."""
        return sum(pool.missing_bytes(n) for pool, n in zip(self.pools, (pages, slabs, exact))) + other

    def open(self, starts: list[int], exact: list[bool], held: list[bool]) -> list[int]:
        """Empty open pages for one sequence, from reserved slots: whether they have exact rows, and who holds them."""
        if not starts:
            return []
        pages = [self.pages.allocate() for _ in starts]
        rows = [new_row(start) for start in starts]
        for row, has_rows in zip(rows, exact):
            if has_rows:
                row[EXACT] = self.exact.allocate()
        self._set(pages, slice(None), torch.tensor(rows, dtype=torch.int32))
        self.counts[_ids(pages)] = torch.tensor([[1, int(h)] for h in held], dtype=torch.int32)
        return pages

    def write(self, page: int, rows: int, k: Tensor, v: Tensor) -> None:
        """Write exact rows ``[H, n, D]`` behind the first ``rows`` of an open page."""
        slot = self.exact.data[0][self.cell(page, EXACT)]
        slot[0, :, rows : rows + k.shape[1]] = k
        slot[1, :, rows : rows + v.shape[1]] = v

    def set_rows(self, pages: list[int], rows: Tensor | int) -> None:
        """Set how many rows of these pages are valid."""
        self._set(pages, ROWS, rows)

    def count_row(self, pages: Tensor) -> Tensor:
        """Count one row more of open pages ``[n]``, of which the device need not be told; returns their rows."""
        rows = self.table[pages, ROWS] + 1
        self.table[pages, ROWS] = rows
        return rows

    def close(self, pages: list[int], bits: tuple[int, int]) -> Tensor:
        """Make open pages closed ones of a tier, whose codes the caller writes.

        Returns
        -------
        Tensor
            int32 ``[n, 6]``: slots of their slabs beyond the base, -1 for none, in the order of the page table.
        """
        slots = torch.full((len(pages), EXACT - FINE), -1, dtype=torch.int32)
        for side in (0, 1):
            columns = (side, 2 + 2 * side, 3 + 2 * side)[: SLABS_OF_BITS[bits[side]] - 1]
            for column in columns:
                slots[:, column] = torch.tensor([self.slabs.allocate() for _ in pages], dtype=torch.int32)
        tiers = torch.tensor([bits], dtype=torch.int32).expand(len(pages), 2)
        self._set(pages, slice(TIER, EXACT), torch.cat([tiers, slots], 1))
        return slots

    def predict_loss(self, pages: list[int], compute: Callable[[], Tensor]) -> None:
        """Have the predicted losses ``[n, 2, 2]`` of pages computed when somebody asks, or many are waiting."""
        self._losses.append((pages, compute))
        if len(self._losses) > MOST_WAITING or self.budget.max_bytes is not None:
            self._settle_losses()

    def _settle_losses(self) -> None:
        losses, self._losses = self._losses, []
        for pages, compute in losses:
            self.pages.data[2][_ids(pages)] = compute()

    def device_table(self, tell: Tell = tell) -> Tensor:
        """Page table on the device, in which open pages count as full: rows behind a sequence's end are not read."""
        if not self.mirrored:
            return self.table
        if self.changed:
            ids = _ids(sorted(self.changed))
            tell(self.pages.data[4], ids, self.device_rows(ids))
            self.changed.clear()
        return self.pages.data[4]

    def device_rows(self, ids: Tensor) -> Tensor:
        """Rows of the page table as the device is told, int32 ``[n, 11]`` on the CPU."""
        rows = self.table[ids]
        rows[rows[:, TIER] == 0, ROWS] = PAGE_TOKENS
        return rows

    def reopen(self, page: int) -> None:
        """Drop the codes of a page that has exact rows."""
        self._release_slabs(_ids([page]))
        self._set([page], slice(TIER, TIER + 2), 0)

    def copy(self, page: int, rows: int, *, held: bool) -> int:
        """Copy the first ``rows`` rows of a page for one sequence, as an open page if its exact rows are there."""
        self._settle_losses()
        row = self.table[page].tolist()
        exact = row[EXACT] >= 0
        (new,) = self.open([row[START]], [exact], [held and exact])
        if exact:
            self.exact.data[0][self.cell(new, EXACT), :, :, :rows] = self.exact.data[0][row[EXACT], :, :, :rows]
        else:
            for data in self.pages.data[:3]:
                data[new] = data[page]
            for column in range(FINE, EXACT):
                if row[column] >= 0:
                    slot = self.slabs.allocate()
                    self.slabs.data[0][slot] = self.slabs.data[0][row[column]]
                    self.table[new, column] = slot
        self.set_rows([new], rows)
        return new

    def retain(self, pages: list[int], held: list[int]) -> None:
        """Count one more user of ``pages``, and one more holder of those in ``held``."""
        self.counts[_ids(pages), USERS] += 1
        self.counts[_ids(held), HOLDERS] += 1

    def release(self, pages: list[int], held: list[int]) -> None:
        """Count one user and holder less; what nobody uses is freed, exact rows that nobody holds are released."""
        self.let_go(held)
        ids = _ids(pages)
        self.counts[ids, USERS] -= 1
        ids = ids[self.counts[ids, USERS] == 0]
        self._release_slabs(ids)
        self._release_exact(ids)
        self.pages.release(ids.tolist())

    def let_go(self, held: list[int]) -> None:
        """Count one holder less of every page in ``held``; exact rows of pages without holders are released."""
        ids = _ids(held)
        self.counts[:, HOLDERS].index_add_(0, ids, torch.full(ids.shape, -1, dtype=torch.int32))
        ids = ids.unique()
        self._release_exact(ids[self.counts[ids, HOLDERS] == 0])

    def take_in(self, other: "Arena", pages: list[int], exact: list[int]) -> dict[int, int]:
        """Copy pages of another arena of the same layout, from reserved slots; users and holders start at 0.

        Exact rows come along with the pages ``exact`` alone.

        Returns
        -------
        dict
            Page there -> page here.
        """
        self._settle_losses()
        other._settle_losses()
        here = [self.pages.allocate() for _ in pages]
        there, ids = _ids(pages), _ids(here)
        for mine, theirs in zip(self.pages.data[:3], other.pages.data[:3]):
            mine[ids] = theirs[there].to(mine.device)
        self.counts[ids] = 0
        kept = set(exact)
        self.table[ids[[p not in kept for p in pages]], EXACT] = -1
        for pool, source, columns in (
            (self.slabs, other.slabs, range(FINE, EXACT)),
            (self.exact, other.exact, range(EXACT, EXACT + 1)),
        ):
            for column in columns:
                used = self.table[ids, column] >= 0
                slots = torch.tensor([pool.allocate() for _ in range(int(used.sum()))], dtype=torch.long)
                old = other.table[there[used], column].long()
                pool.data[0][slots] = source.data[0][old].to(pool.data[0].device)
                self.table[ids[used], column] = slots.int()
        self.changed.update(here if self.mirrored else ())
        return dict(zip(pages, here))

    def slots_of(self, pages: list[int]) -> tuple[int, int]:
        """Slabs and exact slots that these pages hold."""
        rows = self.table[_ids(pages)]
        return int((rows[:, FINE:EXACT] >= 0).sum()), int((rows[:, EXACT] >= 0).sum())

    def shed_candidates(self) -> list[tuple[float, int, int, int]]:
        """Planes that may be dropped now: (predicted loss, start, page, side), one a page and side at most."""
        cost, starts = shed_costs(self.table, self.loss.cpu()), self.table[:, START].tolist()
        has_plane = (self.counts[:, USERS, None] > 0) & (self.table[:, FINE : FINE + 2] >= 0)
        return [
            (float(cost[page, side]), starts[page], page, side)
            for side in (0, 1)
            for page in has_plane[:, side].nonzero()[:, 0].tolist()
        ]

    def shed_candidate(self, page: int, side: int) -> tuple[float, int] | None:
        """Predicted loss and start of a page whose side still has a plane to drop, else None."""
        row = self.table[page].tolist()
        if row[FINE + side] < 0:
            return None
        return float(self.loss[page, side, 1 if row[FINEST + 2 * side] >= 0 else 0]), row[START]

    def shed(self, page: int, side: int) -> int:
        """Drop the least significant plane that a page still has on a side; returns the bytes that become free."""
        columns = [FINEST + 2 * side, FINEST + 2 * side + 1]
        if self.cell(page, columns[0]) < 0:
            columns = [FINE + side]
        slots = [self.cell(page, c) for c in columns]
        self.slabs.release(slots)
        self._set([page], columns, -1)
        return len(slots) * self.slabs.slot_bytes

    def shed_exact(self, page: int) -> int:
        """Drop the exact rows of a closed page; returns the bytes that become free."""
        self.counts[page, HOLDERS] = 0
        self._release_exact(_ids([page]))
        return self.exact.slot_bytes

    def compact(self) -> dict[int, int]:
        """Give free slots back to the budget.

        Returns
        -------
        dict
            Page -> its new number, for every page that moved.
        """
        self._settle_losses()
        moved_pages = self.pages.shrink()
        changed = (moved_pages.get(p, p) for p in self.changed)
        self.changed = {p for p in changed if p < self.pages.slots}
        for pool, columns in ((self.slabs, slice(FINE, EXACT)), (self.exact, slice(EXACT, EXACT + 1))):
            moved = pool.shrink()
            if moved:
                cells = self.table[:, columns]
                new = torch.arange(max(moved) + 2, dtype=torch.int32)
                new[-1] = -1
                new[list(moved)] = torch.tensor(list(moved.values()), dtype=torch.int32)
                cells.copy_(new[cells.long().clamp(max=max(moved))])
                if self.mirrored:
                    self.changed.update(range(self.pages.slots))
        return moved_pages

    @property
    def is_loose(self) -> bool:
        """Whether more than a quarter of a pool is free, as after a long chunk or a crop."""
        return any(len(pool.free) * 4 > pool.slots for pool in self.pools)

    def memory(self) -> dict[str, int]:
        """Allocated bytes by kind."""
        n, layout = self.pages.slots, self.layout
        return {
            "codes": 2 * layout.slab_bytes * n + self.slabs.n_bytes,
            "scales": (layout.center_offset - layout.scale_offset) * n,
            "centers": (layout.record_bytes - layout.center_offset) * n,
            "windows": self.exact.n_bytes,
            "page_tables": sum(t.untyped_storage().nbytes() for t in self.pages.data[1:]),
        }

    def _release_slabs(self, ids: Tensor) -> None:
        cells = self.table[ids, FINE:EXACT]
        self.slabs.release(cells[cells >= 0].tolist())
        self._set(ids, slice(FINE, EXACT), -1)

    def _release_exact(self, ids: Tensor) -> None:
        slots = self.table[ids, EXACT]
        self.exact.release(slots[slots >= 0].tolist())
        self._set(ids, EXACT, -1)

    def _set(self, pages: list[int] | Tensor, columns: int | slice | list[int], values: Tensor | int) -> None:
        ids = pages if isinstance(pages, Tensor) else _ids(pages)
        self.table[ids, columns] = values
        if self.mirrored:
            self.changed.update(ids.tolist())


def _ids(pages: list[int]) -> Tensor:
    return torch.tensor(pages, dtype=torch.long)
