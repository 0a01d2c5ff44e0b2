"""Pages that lie in an engine's own blocks: the engine says which block is whose, and when one is used anew."""

from collections import OrderedDict, deque
from collections.abc import Callable

import torch
from torch import Tensor

from lamina.codec import PAGE_TOKENS
from lamina.errors import MemoryBudgetError
from lamina.pages.arena import HOLDERS, USERS, Arena
from lamina.pages.layout import RecordLayout
from lamina.pages.pool import ALL_RANKS, Budget, Field, Pool
from lamina.pages.store import LayerStore, Sequence
from lamina.pages.table import COLUMNS, EXACT, FINE, START, TIER, read_bits


class BlockPool(Pool):
    """Records in the blocks of an engine, which are handed out in the order in which it names them.

    Attributes
    ----------
    named : deque of int
        Blocks that are opened next.
    """

    def __init__(self, records: Tensor, mirrored: bool) -> None:
        n, device = len(records), records.device
        columns = Field((COLUMNS,), torch.int32, device)
        super().__init__(
            Budget(),
            Field((0,), torch.uint8, device),
            Field((COLUMNS,), torch.int32, "cpu"),
            Field((2, 2), torch.float32, device),
            Field((2,), torch.int32, "cpu", zeroed=True),
            *[columns] * mirrored,
        )
        self._resize(n)
        self.data[0] = records
        self.data[1][:] = -1
        self.data[1][:, TIER : TIER + 2] = 0
        self.named: deque[int] = deque()

    def allocate(self) -> int:
        """Hand out the block that was named."""
        return self.named.popleft()


class BlockArena(Arena):
    """Pages of one layer in an engine's blocks; planes beyond the base and exact rows lie in pools of a fixed size.

    A page without users keeps what it has: its block may be found again by its content. What exact rows it has are
    the first that go when others need room; the rest goes when its block is opened anew.

    Parameters
    ----------
    layout : RecordLayout
        Of a closed page.
    dtype : torch.dtype
        Of the engine's rows.
    records : Tensor
        uint8 ``[blocks, record_bytes]``, the engine's memory.
    slabs : Pool
        Shared by all layers, of a fixed size.
    exact_slots : int
        Exact pages of this layer.
    make_room : callable
        Frees so many slots of ``slabs``, if it can.

    Attributes
    ----------
    idle : OrderedDict
        Pages without users that have exact rows, the longest unused first.
    """

    def __init__(
        self, layout: RecordLayout, dtype: torch.dtype, records: Tensor, slabs: Pool, exact_slots: int,
        make_room: Callable[[int], None],
    ) -> None:  # fmt: skip
        super().__init__(layout, dtype, records.device, Budget())
        self.pages = BlockPool(records, self.mirrored)
        self.slabs = slabs
        self.exact.reserve(exact_slots)
        self.make_room = make_room
        self.idle: OrderedDict[int, None] = OrderedDict()

    @property
    def is_loose(self) -> bool:
        """Never: storage is of a fixed size."""
        return False

    def reserve(self, pages: int, slabs: int, exact: int, other: int = 0, *, ranks: int = ALL_RANKS) -> None:
        """Make sure that so many slots can be handed out, shedding planes and exact rows that nobody uses."""
        while len(self.exact.free) < exact and self.idle:
            page, _ = self.idle.popitem(last=False)
            self._release_exact(torch.tensor([page]))
        if len(self.exact.free) < exact:
            raise RuntimeError(
                f"the pool of exact pages is empty: {exact} are needed, {len(self.exact.free)} of {self.exact.slots} "
                "free; it is sized by max_num_seqs and max_num_batched_tokens, which this step goes beyond"
            )
        if len(self.slabs.free) < slabs:
            self.make_room(slabs - len(self.slabs.free))
        if len(self.slabs.free) < slabs:
            raise MemoryBudgetError(f"the arena is full: {slabs} slots needed, {len(self.slabs.free)} free")

    def open(self, starts: list[int], exact: list[bool], held: list[bool]) -> list[int]:
        """Open the blocks that were named, and drop what they held before."""
        ids = torch.tensor(list(self.pages.named)[: len(starts)], dtype=torch.long)  # type: ignore[attr-defined]
        for page in ids.tolist():
            self.idle.pop(page, None)
        self._release_slabs(ids)
        self._release_exact(ids)
        return super().open(starts, exact, held)

    def retain(self, pages: list[int], held: list[int]) -> None:
        """Count one more user of ``pages``, and one more holder of those in ``held``."""
        super().retain(pages, held)
        for page in pages:
            self.idle.pop(page, None)

    def release(self, pages: list[int], held: list[int]) -> None:
        """Count one user and holder less; of what nobody uses, closed pages keep what they have."""
        counts = self.counts
        for page in held:
            counts[page, HOLDERS] -= 1
        for page in pages:
            counts[page, USERS] -= 1
            if counts[page, USERS] > 0:
                continue
            if self.cell(page, TIER) == 0:
                self._release_exact(torch.tensor([page]))
            elif self.cell(page, EXACT) >= 0:
                self.idle[page] = None
        unheld = [page for page in held if counts[page, HOLDERS] == 0 and counts[page, USERS] > 0]
        self._release_exact(torch.tensor(unheld, dtype=torch.long))

    def packed_bytes(self) -> tuple[int, int]:
        """Bytes and pages of what requests read packed: closed pages in use that have no exact rows."""
        table = self.table
        packed = (table[:, TIER] > 0) & (table[:, EXACT] < 0) & (self.counts[:, USERS] > 0)
        slabs, pages = int((table[packed, FINE:EXACT] >= 0).sum()), int(packed.sum())
        return pages * self.layout.record_bytes + slabs * self.layout.slab_bytes, pages

    def below_tier(self, pages: list[int]) -> int:
        """How many of these pages are read with fewer bits than they were written with."""
        rows = self.table[torch.tensor(pages, dtype=torch.long)]
        k, v = (read_bits(rows, side) < rows[:, TIER + side] for side in (0, 1))
        return int((k | v).sum())


class BlockStore(LayerStore):
    """Sequences of one layer whose pages are blocks of an engine.

    Parameters
    ----------
    arena : BlockArena
        Where they lie.
    blocks : list of list of int
        Blocks of each sequence, in order of position; shared by all layers.
    **settings
        Of :class:`LayerStore`.
    """

    arena: BlockArena

    def __init__(self, arena: BlockArena, blocks: list[list[int]], **settings: object) -> None:
        layout = arena.layout
        super().__init__(
            layout.n_heads, layout.head_dim, arena.dtype, arena.device, budget=Budget(), arena=arena,
            **settings,  # type: ignore[arg-type]
        )  # fmt: skip
        self.blocks = blocks

    def add(self, tokens: int) -> None:
        """Add a sequence whose first ``tokens`` tokens are stored in its blocks already."""
        pages = self.blocks[len(self.sequences)][: tokens // PAGE_TOKENS]
        first = max(self.window.sink, self.window.kept_from(tokens))
        held = [p for p in pages if self.arena.cell(p, START) >= first and self.arena.cell(p, EXACT) >= 0]
        self.arena.retain(pages, held)
        self.sequences.append(Sequence(list(pages), held, tokens))
        self._changed()

    def remove(self, index: int) -> None:
        """Give up a sequence; the last one takes its place."""
        gone = self.sequences[index]
        self.arena.release(gone.pages, gone.held)
        self.sequences[index] = self.sequences[-1]
        self.sequences.pop()
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self.ids.forget()

    def _start_pages(self, rows: list[int], starts: list[int], exact: list[bool]) -> list[int]:
        named = self.arena.pages.named  # type: ignore[attr-defined]
        named.extend(self.blocks[b][start // PAGE_TOKENS] for b, start in zip(rows, starts))
        return super()._start_pages(rows, starts, exact)
