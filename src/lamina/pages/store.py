"""The pages of one layer and their life: open -> closed -> history, and back on roll-back (Lamina SPEC 4)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lamina.codec import PAGE_TOKENS, EncodedPages
from lamina.codec.packing import SLABS_OF_BITS
from lamina.errors import CacheStateError, NonFiniteError
from lamina.pages.config import WindowConfig
from lamina.pages.layout import RecordLayout
from lamina.pages.pool import Budget, Field, Pool
from lamina.pages.table import COLUMNS, EXACT, FINE, FINEST, ROWS, START, TIER, new_row

ENCODE_BATCH = 64


class Encoder(Protocol):
    """What the store needs of an encoder, see :class:`lamina.basis.encoder.PageEncoder`."""

    def encode(self, k: Tensor, v: Tensor, bits_k: int, bits_v: int) -> tuple[EncodedPages, EncodedPages]:
        """Encode whole pages."""

    def shed_loss(self, k: EncodedPages, v: EncodedPages) -> Tensor:
        """Predict what dropping planes costs."""


@dataclass
class Sequence:
    """Pages of one sequence, oldest first, those of them that keep exact rows past the sink, and its tokens."""

    pages: list[int] = field(default_factory=list)
    windowed: list[int] = field(default_factory=list)
    length: int = 0


@dataclass
class StoreView:
    """What attention reads of one layer. Tensors are the storage itself.

    Attributes
    ----------
    layout : RecordLayout
        Fields of ``records``.
    records : Tensor
        uint8 ``[N, record_bytes]``.
    slabs : Tensor
        uint8 ``[M, H, 64, D/4]``: fine and finest slabs.
    exact : Tensor
        ``[E, 2, H, 64, D]`` in the engine's dtype.
    table : Tensor
        int32 ``[N, 11]``, see :mod:`lamina.pages.table`.
    page_ids : Tensor
        int32 ``[B, P]``, padded with -1.
    lengths : Tensor
        int32 ``[B]``, tokens stored.
    window : WindowConfig
        Exact windows.
    """

    layout: RecordLayout
    records: Tensor
    slabs: Tensor
    exact: Tensor
    table: Tensor
    page_ids: Tensor
    lengths: Tensor
    window: WindowConfig


class LayerStore:
    """Pages of one layer, for a batch of sequences.

    Parameters
    ----------
    n_heads, head_dim : int
        KV heads and head dimension.
    dtype, device
        Of the engine's rows.
    window : WindowConfig
        Exact windows.
    encoder : Encoder
        Turns whole pages of rows into codes.
    tiers : callable
        Returns the bits of K and V for a page that closes now.
    budget : Budget
        Shared by all layers of a cache.
    centered : bool
        Whether K pages have a center.
    name : str
        Named in errors.
    """

    def __init__(
        self,
        n_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        window: WindowConfig,
        encoder: Encoder,
        tiers: Callable[[], tuple[int, int]],
        budget: Budget,
        centered: bool = True,
        name: str = "layer",
    ) -> None:
        self.layout = RecordLayout(n_heads, head_dim, centered)
        self.window, self.encoder, self.tiers, self.budget, self.name = window, encoder, tiers, budget, name
        self.pages = Pool(
            budget,
            Field((self.layout.record_bytes,), torch.uint8, device),
            Field((COLUMNS,), torch.int32, "cpu"),
            Field((2, 2), torch.float32, "cpu"),
        )
        self.slabs = Pool(budget, Field((n_heads, PAGE_TOKENS, head_dim // 4), torch.uint8, device))
        self.exact = Pool(budget, Field((2, n_heads, PAGE_TOKENS, head_dim), dtype, device))
        self.sequences: list[Sequence] = []
        self._page_ids: Tensor | None = None
        self._page_id_bytes = 0

    @property
    def pools(self) -> tuple[Pool, ...]:
        """All storage of the layer except the list of page ids."""
        return self.pages, self.slabs, self.exact

    @property
    def table(self) -> Tensor:
        """Page table, int32 ``[N, 11]`` on the CPU, see :mod:`lamina.pages.table`."""
        return self.pages.data[1]

    @property
    def loss(self) -> Tensor:
        """Predicted loss of reading a page's K or V at 2 or at 4 bits, float32 ``[N, 2, 2]`` on the CPU."""
        return self.pages.data[2]

    def append(self, k_bhtd: Tensor, v_bhtd: Tensor) -> None:
        """Append T rows to every sequence, closing the pages that fill up.

        Exact rows that the queries at these positions may read are still there afterwards.

        Parameters
        ----------
        k_bhtd, v_bhtd : Tensor
            ``[B, H, T, D]``, after RoPE and any norms.

        Raises
        ------
        NonFiniteError
            If a row holds NaN or Inf; nothing is stored then.
        MemoryBudgetError
            If the budget cannot hold the rows; nothing is stored then.
        CacheStateError
            If the shape does not fit the cache.
        """
        self._check(k_bhtd, v_bhtd)
        if not self.sequences:
            self.sequences = [Sequence() for _ in range(k_bhtd.shape[0])]
        self.settle()
        tokens = k_bhtd.shape[2]
        bits = self.tiers()
        self._make_room(tokens, bits)
        closed: list[tuple[int, Tensor, Tensor]] = []
        for sequence, k, v in zip(self.sequences, k_bhtd, v_bhtd):
            self._append_one(sequence, k, v, closed)
        for i in range(0, len(closed), ENCODE_BATCH):
            self._close(closed[i : i + ENCODE_BATCH], bits)

    def settle(self) -> None:
        """Release the exact rows that no later query, nor a roll-back, can read."""
        for sequence in self.sequences:
            first = self.window.kept_from(sequence.length)
            while sequence.windowed:
                page = sequence.windowed[0]
                if self._cell(page, START) >= first or self._cell(page, TIER) == 0:
                    break
                sequence.windowed.pop(0)
                self.exact.release([self._cell(page, EXACT)])
                self.table[page, EXACT] = -1
        self._loosen()

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens of every sequence.

        A page that is cut and still has its exact rows is re-opened; one in history stays packed with fewer rows.
        """
        for sequence in self.sequences:
            if length < 0 or length > sequence.length:
                raise CacheStateError(f"{self.name}: cannot crop {sequence.length} tokens to {length}")
            while sequence.pages and self._cell(sequence.pages[-1], START) >= length:
                page = sequence.pages.pop()
                self._free(page)
                sequence.windowed = [p for p in sequence.windowed if p != page]
                self._page_ids = None
            sequence.length = length
            if sequence.pages:
                page = sequence.pages[-1]
                rows = length - self._cell(page, START)
                if rows < self._cell(page, ROWS):
                    self.table[page, ROWS] = rows
                    if self._cell(page, EXACT) >= 0:
                        self._drop_slabs(page)
                        self.table[page, TIER : TIER + 2] = 0
        self._loosen()

    def reset(self) -> None:
        """Forget every sequence and give all storage back."""
        for sequence in self.sequences:
            for page in sequence.pages:
                self._free(page)
        self.sequences = []
        self._page_ids = None
        for pool in self.pools:
            pool.shrink()

    def view(self) -> StoreView:
        """What attention reads."""
        lengths = torch.tensor([s.length for s in self.sequences], dtype=torch.int32)
        return StoreView(
            self.layout,
            self.pages.data[0],
            self.slabs.data[0],
            self.exact.data[0],
            self.table,
            self.page_ids(),
            lengths,
            self.window,
        )

    def page_ids(self) -> Tensor:
        """Page ids of every sequence, int32 ``[B, P]``, padded with -1."""
        if self._page_ids is None:
            width = max((len(s.pages) for s in self.sequences), default=0)
            rows = [s.pages + [-1] * (width - len(s.pages)) for s in self.sequences]
            self._page_ids = torch.tensor(rows, dtype=torch.int32).view(len(self.sequences), width)
            n_bytes = self._page_ids.untyped_storage().nbytes()
            self.budget.used += n_bytes - self._page_id_bytes
            self._page_id_bytes = n_bytes
        return self._page_ids

    def memory(self) -> dict[str, int]:
        """Allocated bytes by kind."""
        n, layout = self.pages.slots, self.layout
        scales = layout.center_offset - layout.scale_offset
        return {
            "codes": 2 * layout.slab_bytes * n + self.slabs.n_bytes,
            "scales": scales * n,
            "centers": (layout.record_bytes - layout.center_offset) * n,
            "windows": self.exact.n_bytes,
            "page_tables": sum(t.untyped_storage().nbytes() for t in self.pages.data[1:])
            + self.page_ids().untyped_storage().nbytes(),
        }

    def history_bits(self) -> tuple[int, int]:
        """Bits and elements (K and V) of the rows that attention of the next token reads packed."""
        h, d = self.layout.n_heads, self.layout.head_dim
        n_bytes = elements = 0
        for sequence in self.sequences:
            first_exact = self.window.exact_from(sequence.length)
            for page in sequence.pages:
                row = self.table[page].tolist()
                if row[TIER] == 0 or (row[EXACT] >= 0 and (row[START] < self.window.sink or row[START] >= first_exact)):
                    continue
                slabs = sum(slot >= 0 for slot in row[FINE:EXACT])
                n_bytes += self.layout.record_bytes + slabs * self.layout.slab_bytes
                elements += 2 * h * d * row[ROWS]
        return n_bytes * 8, elements

    def shed_candidates(self) -> list[tuple[float, int, int, int]]:
        """Planes that may be dropped now: (predicted loss, start, page, side), one a page and side at most."""
        found = []
        for page in (p for s in self.sequences for p in s.pages):
            for side in (0, 1):
                candidate = self.shed_candidate(page, side)
                if candidate is not None:
                    found.append((*candidate, page, side))
        return found

    def shed_candidate(self, page: int, side: int) -> tuple[float, int] | None:
        """Predicted loss and start of a page whose side still has a plane to drop, else None."""
        row = self.table[page].tolist()
        if row[FINE + side] < 0:
            return None
        return float(self.loss[page, side, 1 if row[FINEST + 2 * side] >= 0 else 0]), row[START]

    def shed(self, page: int, side: int) -> int:
        """Drop the least significant plane that a page still has on a side; returns the bytes that become free."""
        columns = [FINEST + 2 * side, FINEST + 2 * side + 1]
        if self._cell(page, columns[0]) < 0:
            columns = [FINE + side]
        slots = [self._cell(page, c) for c in columns]
        self.slabs.release(slots)
        self.table[page, columns] = -1
        return len(slots) * self.slabs.slot_bytes

    def compact(self) -> None:
        """Give the free slots of the slab and exact pools back to the budget."""
        for pool, columns in ((self.slabs, slice(FINE, EXACT)), (self.exact, slice(EXACT, EXACT + 1))):
            moved = pool.shrink()
            if moved:
                cells = self.table[:, columns]
                old = torch.tensor(list(moved), dtype=torch.int32)
                new = torch.tensor(list(moved.values()), dtype=torch.int32)
                hit = (cells[..., None] == old).nonzero()
                cells[hit[:, 0], hit[:, 1]] = new[hit[:, 2]]

    def _loosen(self) -> None:
        """Compact when more than a quarter of a pool is free, as after a long chunk or crop."""
        if any(len(pool.free) * 4 > pool.slots for pool in (self.slabs, self.exact)):
            self.compact()

    def _check(self, k: Tensor, v: Tensor) -> None:
        h, d = self.layout.n_heads, self.layout.head_dim
        batch = len(self.sequences) or k.shape[0]
        if k.shape != v.shape or k.dim() != 4 or (k.shape[0], k.shape[1], k.shape[3]) != (batch, h, d):
            raise CacheStateError(
                f"{self.name}: keys {tuple(k.shape)} and values {tuple(v.shape)} do not fit a cache of {batch} "
                f"sequences with {h} KV heads of dimension {d}; use a new cache for another batch"
            )
        if k.dtype != self.exact.data[0].dtype:
            raise CacheStateError(f"{self.name}: rows are {k.dtype}, the cache holds {self.exact.data[0].dtype}")
        if not bool(torch.isfinite(k.sum(dtype=torch.float64) + v.sum(dtype=torch.float64))):
            for side, x in (("key", k), ("value", v)):
                bad = (~torch.isfinite(x)).nonzero()
                if len(bad):
                    b, head, t, _ = bad[0].tolist()
                    position = t + (self.sequences[b].length if self.sequences else 0)
                    raise NonFiniteError(
                        f"{self.name}: the {side} row of sequence {b}, KV head {head}, position {position} holds NaN "
                        "or Inf; the model's weights or inputs are damaged, or its dtype overflows (try bfloat16)"
                    )

    def _make_room(self, tokens: int, bits: tuple[int, int]) -> None:
        """Reserve every slot that appending ``tokens`` rows can take."""
        pages = exact = closing = 0
        for s in self.sequences:
            is_open = bool(s.pages) and self._cell(s.pages[-1], TIER) == 0
            rows = self._cell(s.pages[-1], ROWS) if is_open else 0
            first = s.length + (PAGE_TOKENS - rows if is_open else 0)
            starts = range(first, s.length + tokens, PAGE_TOKENS)
            pages += len(starts)
            exact += sum(self._keeps_exact(start, s.length + tokens) for start in starts)
            closing += (rows + tokens) // PAGE_TOKENS
        slabs = closing * sum(SLABS_OF_BITS[b] - 1 for b in bits)
        needs = ((self.pages, pages), (self.slabs, slabs), (self.exact, exact))
        id_bytes = 4 * (sum(len(s.pages) for s in self.sequences) + pages) - self._page_id_bytes
        self.budget.ensure(lambda: sum(pool.missing_bytes(n) for pool, n in needs) + max(0, id_bytes))
        for pool, n in needs:
            pool.reserve(n)

    def _keeps_exact(self, start: int, length: int) -> bool:
        """Whether a page keeps its exact rows while the next query is at position ``length``."""
        return start < self.window.sink or start + PAGE_TOKENS > length or start >= self.window.kept_from(length)

    def _append_one(self, sequence: Sequence, k: Tensor, v: Tensor, closed: list[tuple[int, Tensor, Tensor]]) -> None:
        """Write rows ``[H, T, D]`` to the sequence's pages; pages that fill up are added to ``closed``."""
        tokens = k.shape[1]
        end = sequence.length + tokens
        done = 0
        while done < tokens:
            page = sequence.pages[-1] if sequence.pages else -1
            if page < 0 or self._cell(page, TIER) or self._cell(page, ROWS) == PAGE_TOKENS:
                page = self._open_page(sequence, self._keeps_exact(sequence.length, end))
            rows = self._cell(page, ROWS)
            n = min(PAGE_TOKENS - rows, tokens - done)
            slot = self._cell(page, EXACT)
            k_rows, v_rows = k[:, done : done + n], v[:, done : done + n]
            if slot >= 0:
                self.exact.data[0][slot, 0, :, rows : rows + n] = k_rows
                self.exact.data[0][slot, 1, :, rows : rows + n] = v_rows
                k_rows, v_rows = self.exact.data[0][slot]
            self.table[page, ROWS] = rows + n
            if rows + n == PAGE_TOKENS:
                closed.append((page, k_rows, v_rows))
            done += n
            sequence.length += n

    def _open_page(self, sequence: Sequence, exact: bool) -> int:
        page = self.pages.allocate()
        row = new_row(sequence.length)
        if exact:
            row[EXACT] = self.exact.allocate()
            if sequence.length >= self.window.sink:
                sequence.windowed.append(page)
        self.table[page] = torch.tensor(row, dtype=torch.int32)
        sequence.pages.append(page)
        self._page_ids = None
        return page

    def _close(self, pages: list[tuple[int, Tensor, Tensor]], bits: tuple[int, int]) -> None:
        """Encode full pages and write their records and planes."""
        ids = torch.tensor([p for p, _, _ in pages])
        k, v = self.encoder.encode(torch.stack([k for _, k, _ in pages]), torch.stack([v for _, _, v in pages]), *bits)
        views = self.layout.views(self.pages.data[0])
        for side, e in enumerate((k, v)):
            views.base[ids, side] = e.slabs[0]
            views.scale[ids, side], views.mid[ids, side], views.gain[ids, side] = e.scale, e.mid, e.gain
            columns = [FINE + side, FINEST + 2 * side, FINEST + 2 * side + 1][: len(e.slabs) - 1]
            for column, slab in zip(columns, e.slabs[1:]):
                slots = torch.tensor([self.slabs.allocate() for _ in pages])
                self.slabs.data[0][slots] = slab
                self.table[ids, column] = slots.int()
            self.table[ids, TIER + side] = e.bits
        if k.center is not None and k.center_scale is not None:
            views.center[ids], views.center_scale[ids] = k.center, k.center_scale  # type: ignore[index]
        self.loss[ids] = self.encoder.shed_loss(k, v).cpu()

    def _drop_slabs(self, page: int) -> None:
        slots = [s for s in self.table[page, FINE:EXACT].tolist() if s >= 0]
        self.slabs.release(slots)
        self.table[page, FINE:EXACT] = -1

    def _free(self, page: int) -> None:
        self._drop_slabs(page)
        if self._cell(page, EXACT) >= 0:
            self.exact.release([self._cell(page, EXACT)])
        self.pages.release([page])

    def _cell(self, page: int, column: int) -> int:
        return int(self.table[page, column])
