"""Pages that are an engine's own blocks: the books of all layers at once, which differ in planes alone."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from lamina.attention.cuda.tables import Patches
from lamina.codec import PAGE_TOKENS
from lamina.codec.packing import slabs_beyond_base
from lamina.pages.layout import RecordLayout
from lamina.pages.table import COLUMNS, EXACT, FINE, FINEST, ROWS, START, TIER, read_bits, shed_costs
from lamina.pages.view import StoreView

BOOK_BYTES = 4 * COLUMNS + 16
"""Bytes on the device that are known of a page and layer besides its record: its row of the table, its losses."""


class Slots:
    """Free slots of a pool of a fixed size."""

    def __init__(self, n: int) -> None:
        self.size = self.left = n
        self._free = np.arange(n - 1, -1, -1, dtype=np.int32)

    @property
    def used(self) -> int:
        """Slots that are handed out."""
        return self.size - self.left

    @property
    def free(self) -> list[int]:
        """Slots that are not handed out."""
        return self._free[: self.left].tolist()

    def take(self, n: int) -> np.ndarray:
        """Hand out ``n`` slots, which are there."""
        assert n <= self.left, f"{n} slots are asked for, {self.left} of {self.size} are free"
        self.left -= n
        return self._free[self.left : self.left + n].copy()

    def give(self, slots: np.ndarray) -> None:
        """Take slots back."""
        self._free[self.left : self.left + len(slots)] = slots
        self.left += len(slots)


class BlockPages:
    """Pages of L layers in N blocks of an engine.

    A page without users keeps what it has: its block may be found again by its content. What exact rows it has are
    the first that go when others need room; the rest goes when its block is opened anew.

    Parameters
    ----------
    layout : RecordLayout
        Of a closed page, all layers alike.
    dtype : torch.dtype
        Of the engine's rows.
    records : list of Tensor
        uint8 ``[N, record_bytes]`` a layer, the engine's memory.
    slabs, exact_slots : int
        Slots for planes beyond the base, shared by all layers, and for exact rows, as many in every layer.

    Attributes
    ----------
    table : Tensor
        int32 ``[L, N, 11]`` on the CPU, see :mod:`lamina.pages.table`; every page counts as full, for nobody reads
        behind the end of a sequence.
    slabs : Tensor
        uint8 ``[slabs, H, 64, D/4]``.
    exact : Tensor
        ``[L, E, 2, H, 64, D]``.
    loss : Tensor
        float32 ``[L, N, 2, 2]``: predicted loss of reading K or V at 2 or at 4 bits.
    users, holders : ndarray
        int32 ``[N]``: requests that have a page, and those of them that still need its exact rows.
    planes : ndarray
        int32 ``[N]``: slots of ``slabs`` that a page has, over all layers.
    idle : OrderedDict
        Pages without users that have exact rows, the longest unused first.
    """

    def __init__(
        self, layout: RecordLayout, dtype: torch.dtype, records: list[Tensor], slabs: int, exact_slots: int
    ) -> None:
        n_layers, n, device = len(records), len(records[0]), records[0].device
        h, d = layout.n_heads, layout.head_dim
        self.layout, self.records, self.device = layout, records, device
        with torch.inference_mode(False):
            self.table = torch.full((n_layers, n, COLUMNS), -1, dtype=torch.int32)
            # Blocks that nobody has opened count as closed: what engines do with them while they warm up is harmless.
            self.table[:, :, START], self.table[:, :, ROWS], self.table[:, :, TIER : TIER + 2] = 0, PAGE_TOKENS, 2
            self.slabs = torch.empty(slabs, h, PAGE_TOKENS, d // 4, dtype=torch.uint8, device=device)
            self.exact = torch.empty(n_layers, exact_slots, 2, h, PAGE_TOKENS, d, dtype=dtype, device=device)
            self.loss = torch.zeros(n_layers, n, 2, 2, device=device)
            self._there = self.table if device.type == "cpu" else self.table.to(device)
        self.cells = self.table.numpy()
        self.users, self.holders = np.zeros(n, np.int32), np.zeros(n, np.int32)
        self.planes = np.zeros(n, np.int32)
        self.free_slabs, self.free_exact = Slots(slabs), Slots(exact_slots)
        self.idle: OrderedDict[int, None] = OrderedDict()
        self._changed: set[int] = set()

    @property
    def n_layers(self) -> int:
        """Layers."""
        return len(self.records)

    def is_open(self, page: int) -> bool:
        """Whether a page is open."""
        return bool(self.cells[0, page, TIER] == 0)

    def exact_slot(self, page: int) -> int:
        """Slot of a page's exact rows, -1 without any."""
        return int(self.cells[0, page, EXACT])

    def view(self, layer: int, page_ids: Tensor, lengths: Tensor, window: object) -> StoreView:
        """What attention reads of a layer."""
        return StoreView(
            self.layout, self.records[layer], self.slabs, self.exact[layer], self._there[layer], page_ids, lengths,
            window, cut=False,  # type: ignore[arg-type]
        )  # fmt: skip

    def reserve_exact(self, n: int) -> None:
        """Make sure that ``n`` exact pages can be opened.

        Raises
        ------
        RuntimeError
            If there is no room, which the pool's size rules out.
        """
        while self.free_exact.left < n and self.idle:
            page, _ = self.idle.popitem(last=False)
            self._release_exact([page])
        if self.free_exact.left < n:
            raise RuntimeError(
                f"the pool of exact pages is empty: {n} are needed, {self.free_exact.left} of {self.free_exact.size} "
                "are free; it is sized by max_num_seqs and max_num_batched_tokens, which this step goes beyond"
            )

    def open(self, pages: list[int], starts: list[int], exact: Sequence[bool], held: Sequence[bool]) -> None:
        """Open pages for one request, after what they held before is dropped.

        Parameters
        ----------
        pages, starts : list of int
            Blocks, and the positions of their first tokens.
        exact : list of bool
            Which have exact rows; the others are closed at once.
        held : list of bool
            Which exact rows the request holds until it is past them.
        """
        if not pages:
            return
        for page in pages:
            self.idle.pop(page, None)
        self._release_slabs(pages)
        self._release_exact(pages)
        self.cells[:, pages, START] = starts
        self.cells[:, pages, TIER : TIER + 2] = 0
        self.users[pages], self.holders[pages] = 1, held
        kept = [page for page, has in zip(pages, exact) if has]
        self.reserve_exact(len(kept))
        self.cells[:, kept, EXACT] = self.free_exact.take(len(kept))
        self._changed.update(pages)

    def slabs_needed(self, pages: int, tiers: Sequence[tuple[int, int]]) -> int:
        """Slots of planes that closing so many pages takes."""
        return pages * slabs_beyond_base(bits for pair in tiers for bits in pair)

    def close(self, pages: list[int], tiers: Sequence[tuple[int, int]]) -> None:
        """Make open pages closed ones, of one pair of bits a layer; room for their planes is there."""
        bits = np.array(tiers, dtype=np.int32)
        self.cells[:, pages, TIER : TIER + 2] = bits[:, None]
        for side in (0, 1):
            for columns, least in ((FINE + side, 4), (FINEST + 2 * side, 8), (FINEST + 2 * side + 1, 8)):
                layers = np.flatnonzero(bits[:, side] >= least)
                slots = self.free_slabs.take(len(layers) * len(pages)).reshape(len(layers), len(pages))
                self.cells[layers[:, None], np.array(pages)[None], columns] = slots
                self.planes[pages] += len(layers)
        self._changed.update(pages)

    def retain(self, pages: list[int], held: list[int]) -> None:
        """Count one more user of ``pages``, and one more holder of those in ``held``."""
        self.users[pages] += 1
        self.holders[held] += 1
        for page in pages:
            self.idle.pop(page, None)

    def release(self, pages: list[int], held: Iterable[int]) -> None:
        """Count one user and holder less; of what nobody uses, closed pages keep what they have."""
        self.users[pages] -= 1
        self.holders[list(held)] -= 1
        for page in pages:
            if self.users[page] == 0 and self.exact_slot(page) >= 0:
                if self.is_open(page):
                    self._forget(page)
                else:
                    self.idle[page] = None
        self._release_exact([p for p in held if self.holders[p] == 0 and self.users[p] > 0])

    def drop_unheld(self, pages: list[int]) -> None:
        """Release exact rows of closed pages that nobody holds."""
        self._release_exact([p for p in pages if self.holders[p] == 0 and not self.is_open(p)])

    def let_go(self, held: list[int]) -> None:
        """Count one holder less of every page in ``held``; exact rows of pages without holders are released."""
        self.holders[held] -= 1
        self._release_exact([page for page in held if self.holders[page] == 0])

    def below_tier(self, pages: list[int]) -> int:
        """How many of these pages some layer reads with fewer bits than they were written with."""
        rows = self.table[:, pages]
        below = [(read_bits(rows, side) < rows[..., TIER + side]).any(0) for side in (0, 1)]
        return int((below[0] | below[1]).sum())

    def packed_bytes(self) -> tuple[int, int]:
        """Bytes and pages, over all layers, of what requests read packed: closed pages in use without exact rows."""
        pages = np.flatnonzero((self.users > 0) & (self.cells[0, :, TIER] > 0) & (self.cells[0, :, EXACT] < 0))
        n = len(pages) * self.n_layers
        return n * self.layout.record_bytes + int(self.planes[pages].sum()) * self.layout.slab_bytes, n

    def shed(self, slots: int, reduce: Callable[[Tensor], Tensor]) -> int:
        """Free at least ``slots`` slots, if that many are in use, by dropping the planes of least predicted loss.

        Parameters
        ----------
        slots : int
            How many.
        reduce : callable
            Averages losses ``[L, N, 2]`` over ranks. Ties go by layer, then page, on all of them alike.

        Returns
        -------
        int
            Planes dropped: the finest of a page and side, which are two slots or one.
        """
        target, dropped = min(self.free_slabs.left + slots, self.free_slabs.size), 0
        while self.free_slabs.left < target:
            self.flush()
            # Losses of rows that are not finite are neither: such planes are worth nothing, and never infinite.
            cost = shed_costs(self._there, self.loss.nan_to_num(nan=0.0).clamp(max=1e30))
            there = int(cost.isfinite().sum())
            order = torch.sort(reduce(cost).flatten(), stable=True).indices
            n = min(target - self.free_slabs.left, there)
            flat = order[:n].cpu().numpy()
            layers, pages, sides = np.unravel_index(flat, cost.shape)
            is_fine = self.cells[layers, pages, FINEST + 2 * sides] < 0
            for first, at in ((FINEST, ~is_fine), (FINEST + 1, ~is_fine), (FINE, is_fine)):
                cells = layers[at], pages[at], first + sides[at] * (1 if first == FINE else 2)
                self.free_slabs.give(self.cells[cells])
                self.cells[cells] = -1
                np.subtract.at(self.planes, pages[at], 1)
            self._changed.update(pages.tolist())
            dropped += n
        return dropped

    def touch(self, page: int) -> None:
        """Have the next :meth:`flush` tell of a page."""
        self._changed.add(page)

    def flush(self) -> None:
        """Tell the device what has changed."""
        if self._changed and self._there is not self.table:
            pages, n = torch.tensor(sorted(self._changed)), self.table.shape[1]
            patches = Patches(self.device)
            ids = torch.arange(self.n_layers)[:, None] * n + pages
            patches(self._there.view(-1, COLUMNS), ids.flatten(), self.table[:, pages].flatten(0, 1))
            patches.flush()
        self._changed.clear()

    def memory(self) -> dict[str, int]:
        """Bytes by kind."""
        layout, n = self.layout, self.n_layers * len(self.records[0])
        return {
            "codes": 2 * layout.slab_bytes * n,
            "scales": (layout.center_offset - layout.scale_offset) * n,
            "centers": (layout.record_bytes - layout.center_offset) * n,
            "arena": self.slabs.nbytes,
            "windows": self.exact.nbytes,
            "page_tables": BOOK_BYTES * n,
        }

    def _forget(self, page: int) -> None:
        """Give up an open page: what it holds is in no record."""
        self._release_exact([page])
        self.cells[:, page, TIER : TIER + 2] = 2
        self._changed.add(page)

    def _release_slabs(self, pages: list[int]) -> None:
        slots = self.cells[:, pages, FINE:EXACT]
        self.free_slabs.give(slots[slots >= 0])
        self.cells[:, pages, FINE:EXACT] = -1
        self.planes[pages] = 0
        self._changed.update(pages)

    def _release_exact(self, pages: list[int]) -> None:
        slots = self.cells[0, pages, EXACT]
        self.free_exact.give(slots[slots >= 0])
        self.cells[:, pages, EXACT] = -1
        self._changed.update(pages)
