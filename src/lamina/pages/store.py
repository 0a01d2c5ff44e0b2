"""The sequences of one layer and the life of their pages: open -> closed -> history, and back (Lamina SPEC 4)."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lamina.codec import PAGE_TOKENS
from lamina.codec.packing import slabs_beyond_base
from lamina.errors import CacheStateError, MemoryBudgetError, NonFiniteError
from lamina.pages.arena import USERS, Arena
from lamina.pages.config import WindowConfig
from lamina.pages.ids import PageIds, Tell, tell
from lamina.pages.layout import RecordLayout
from lamina.pages.pool import Budget
from lamina.pages.table import EXACT, FINE, ROWS, START, TIER
from lamina.pages.view import StoreView
from lamina.pages.writer import FilledPages, PageWriter, by_page


@dataclass(frozen=True)
class Cut:
    """What rows lose for lack of bytes when they are appended.

    Attributes
    ----------
    bits : int
        Most bits of a page that closes.
    windows : int
        Pages that close keep their exact rows: 3 as the windows say, 2 without those for rolling back, 1 first tokens
        alone, 0 never.
    ranks : int
        Ranks of older exact rows that may go instead.
    """

    bits: int
    windows: int
    ranks: int


CUTS = (Cut(8, 3, 0), Cut(4, 3, 0), Cut(2, 3, 0), Cut(2, 3, 1), Cut(2, 2, 2), Cut(2, 1, 2), Cut(2, 0, 3))
"""From nothing to all that can be given up."""


@dataclass
class Sequence:
    """Pages of one sequence, oldest first, those past the sink whose exact rows it holds, and its tokens."""

    pages: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    length: int = 0

    def copy(self) -> "Sequence":
        """Another sequence of the same pages."""
        return Sequence(list(self.pages), list(self.held), self.length)


Snapshot = list[Sequence]
"""Sequences of a layer as they were at one time; they count as users of their pages."""


class LayerStore:
    """Pages of one layer, for a batch of sequences that may share them.

    Parameters
    ----------
    n_heads, head_dim : int
        KV heads and head dimension.
    dtype, device
        Of the engine's rows.
    window : WindowConfig
        Exact windows.
    writer : PageWriter
        Encodes whole pages into the arena.
    tiers : callable
        Returns the bits of K and V for a page that closes now.
    budget : Budget
        Shared by all layers of a cache.
    centered : bool
        Whether K pages have a center.
    name : str
        Named in errors.
    mirrored : bool, optional
        Whether the device has page tables of its own; by default unless it is the CPU.
    on_close : callable, optional
        Called with the first positions of pages that were closed, their bits, and those of them in the windows whose
        exact rows were not kept for lack of bytes.

    Attributes
    ----------
    version : int
        Counts what happens to the sequences, steps by :meth:`begin_step` aside.
    holds_storage : bool
        Whether free slots are kept, as for kernels in a CUDA graph that know where the storage lies.
    """

    def __init__(
        self,
        n_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        window: WindowConfig,
        writer: PageWriter,
        tiers: Callable[[], tuple[int, int]],
        budget: Budget,
        centered: bool = True,
        name: str = "layer",
        mirrored: bool | None = None,
        on_close: Callable[[list[int], tuple[int, int], list[int]], None] | None = None,
    ) -> None:
        self.layout = RecordLayout(n_heads, head_dim, centered)
        self.arena = Arena(self.layout, dtype, device, budget, mirrored)
        self.window, self.writer, self.tiers, self.budget, self.name = window, writer, tiers, budget, name
        self.on_close = on_close
        self.sequences: list[Sequence] = []
        self.snapshots: list[Snapshot] = []
        self.version = 0
        self.holds_storage = False
        self._open = torch.empty(0, dtype=torch.long)
        self._steps_left = 0
        self._bits = (0, 0)
        self.ids = PageIds(budget, self.arena.device, self.arena.mirrored)
        self._lengths: tuple[list[int], Tensor] = [], torch.empty(0, dtype=torch.int32)

    @property
    def dtype(self) -> torch.dtype:
        """Of the engine's rows."""
        return self.arena.dtype

    @property
    def device(self) -> torch.device:
        """Of the engine's rows."""
        return self.arena.device

    def append(self, k: Tensor, v: Tensor, real: Tensor | None = None, cut: Cut | None = None) -> None:
        """Append rows to the sequences, closing the pages that fill up.

        Exact rows that the queries at these positions may read are still there afterwards.

        Parameters
        ----------
        k, v : Tensor
            ``[B, H, T, D]``, after RoPE and any norms.
        real : Tensor, optional
            bool ``[B, T]``: rows to store; the others are padding and leave no trace. Default: all.
        cut : Cut, optional
            What is given up for lack of bytes; the first of ``CUTS`` for which there is room unless told.

        Raises
        ------
        NonFiniteError
            If a row holds NaN or Inf; nothing is stored then.
        MemoryBudgetError
            If the budget cannot hold the rows; nothing is stored then.
        CacheStateError
            If the shape does not fit the cache.
        """
        self._check_shape(k, v)
        rows = [(k[b], v[b]) for b in range(k.shape[0])]
        if real is not None:
            rows = [(k_row[:, keep], v_row[:, keep]) for (k_row, v_row), keep in zip(rows, real.to(k.device))]
        self._check_finite(k, v, rows)
        self.version += 1
        self.settle()
        bits, windows = self._make_room([k_row.shape[1] for k_row, _ in rows], cut)
        if not self.sequences:
            self.sequences = [Sequence() for _ in rows]
            self.ids.forget()
        filled: list[FilledPages] = []
        missed: list[int] = []
        for b, (k_row, v_row) in enumerate(rows):
            missed += self._append_one(b, k_row, v_row, filled, windows)
        self._close(filled, bits, missed)
        # The table of page ids counts from now on, not from when it is first read.
        self.page_ids()

    @property
    def at_edge(self) -> bool:
        """Whether the next step starts or fills a page, or the sequences are not as the last step left them."""
        return self._steps_left <= 0 or len(self._open) != len(self.sequences)

    @property
    def closes_unseen(self) -> bool:
        """Whether the next row fills a page that its own query reads packed, as it starts too early for the window."""
        last, is_open = self._last_pages(self.sequences)
        starts = self.arena.table[last, START].tolist() if bool(is_open.any()) else []
        return any(
            has_room
            and start + PAGE_TOKENS == s.length + 1
            and self.window.sink <= start < self.window.exact_from(s.length)
            for s, start, has_room in zip(self.sequences, starts, is_open.tolist())
        )

    def begin_step(self, cut: Cut | None = None) -> None:
        """Prepare for one row of every sequence that kernels write: each gets an open page of its own.

        Later steps need no preparation until :attr:`at_edge` says so, or :attr:`version` changes.
        """
        self.settle()
        self._bits, _ = self._make_room([1] * len(self.sequences), cut)
        last, is_open = self._last_pages(self.sequences)
        for b in (is_open & (self.arena.counts[last, USERS] > 1)).nonzero()[:, 0].tolist():
            page = self.sequences[b].pages[-1]
            # The last of those who share a page may keep it.
            if self.arena.users(page) > 1:
                self._own(self.sequences[b], self.arena.cell(page, ROWS))
        new = (~is_open).nonzero()[:, 0].tolist()
        starts = [self.sequences[b].length for b in new]
        self._start_pages(new, starts, [True] * len(new))
        self._open = torch.tensor([s.pages[-1] for s in self.sequences], dtype=torch.long)
        rows = self.arena.table[self._open, ROWS]
        self._steps_left = PAGE_TOKENS - 1 - int(rows.max()) if len(rows) else 0

    def end_step(self) -> None:
        """The kernels have written the row; pages that are full now are closed."""
        for s in self.sequences:
            s.length += 1
        self._steps_left -= 1
        full = self._open[self.arena.count_row(self._open) == PAGE_TOKENS].tolist()
        if full:
            rows = self.arena.exact.data[0][self.arena.table[full, EXACT].long()]
            self._close([FilledPages(full, rows[:, 0], rows[:, 1])], self._bits, [])
            self._open = self._open[:0]

    def reserve(self, tokens: int, bits: tuple[int, int]) -> None:
        """Have storage for so many more rows of every sequence, closed at a tier."""
        n, pages = len(self.sequences), -(-tokens // PAGE_TOKENS) + 1
        slabs = slabs_beyond_base(bits)
        self.arena.reserve(n * pages, n * pages * slabs, 2 * n)

    def settle(self) -> None:
        """Release the exact rows that no later query, nor a roll-back, can read."""
        holding = [s for s in self.sequences if s.held]
        oldest = self.arena.table[[s.held[0] for s in holding]] if holding else self.arena.table[:0]
        gone: list[int] = []
        for sequence, start, tier in zip(holding, oldest[:, START].tolist(), oldest[:, TIER].tolist()):
            first = self.window.kept_from(sequence.length)
            if start < first and tier:
                n = 1
                while n < len(sequence.held) and self._is_past(sequence.held[n], first):
                    n += 1
                gone += sequence.held[:n]
                del sequence.held[:n]
        if gone:
            self.arena.let_go(gone)
        self._loosen()

    def crop(self, lengths: list[int]) -> None:
        """Keep the first ``lengths[b]`` tokens of every sequence.

        A page that is cut and still has its exact rows is re-opened; one in history stays packed with fewer rows.
        Exact rows that another sequence or a snapshot still holds are used again.
        """
        for sequence, length in zip(self.sequences, lengths, strict=True):
            if not 0 <= length <= sequence.length:
                raise CacheStateError(f"{self.name}: cannot crop {sequence.length} tokens to {length}")
        self.version += 1
        self.arena.reserve(*self._crop_slots(lengths))
        cropped = [(s, length) for s, length in zip(self.sequences, lengths) if length < s.length]
        for sequence, length in cropped:
            self._drop_tail(sequence, length)
        for sequence, length in cropped:
            self._cut_last(sequence, length)
        self._loosen()

    def append_bytes(self, tokens: list[int], cut: Cut) -> int:
        """Bytes that appending ``tokens[b]`` rows to each sequence must allocate now, at one of ``CUTS``."""
        return self.arena.missing_bytes(*self._append_slots(tokens, _cut_bits(self.tiers(), cut), cut.windows))

    def extend_bytes(self, other: "LayerStore") -> int:
        """Bytes that :meth:`extend` would allocate now."""
        return self.arena.missing_bytes(*self._extend_slots(other))

    def replace_bytes(self, sequences: list[Sequence]) -> int:
        """Bytes that a batch of these sequences would add: its page ids."""
        return self.ids.growth([len(s.pages) for s in sequences])

    def crop_bytes(self, lengths: list[int]) -> int:
        """Bytes that :meth:`crop` would allocate now, for copies of pages that others use too."""
        return self.arena.missing_bytes(*self._crop_slots(lengths))

    def select(self, indices: list[int]) -> None:
        """Make the batch of the sequences ``indices``, in this order; pages are shared until they differ."""
        self.budget.ensure(lambda: self.replace_bytes([self.sequences[i] for i in indices]))
        self._replace([self.sequences[i].copy() for i in indices])

    def snapshot(self) -> Snapshot:
        """Remember all sequences as they are now; costs no bytes until they change."""
        taken = [s.copy() for s in self.sequences]
        self.version += 1
        for s in taken:
            self.arena.retain(s.pages, s.held)
        self.snapshots.append(taken)
        return taken

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot, which stays usable."""
        self.budget.ensure(lambda: self.replace_bytes(snapshot))
        self._replace([s.copy() for s in snapshot])

    def forget(self, snapshot: Snapshot) -> None:
        """Give up a snapshot and the pages that it alone uses."""
        self.snapshots = [s for s in self.snapshots if s is not snapshot]
        for s in snapshot:
            self.arena.release(s.pages, s.held)
        self._loosen()

    def extend(self, other: "LayerStore") -> None:
        """Add copies of another store's sequences to the batch."""
        pages = list(dict.fromkeys(p for s in other.sequences for p in s.pages))
        self.version += 1
        self.arena.reserve(*self._extend_slots(other))
        here = self.arena.take_in(other.arena, pages, self._exact_of(other, pages))
        for s in other.sequences:
            added = Sequence([here[p] for p in s.pages], [here[p] for p in s.held], s.length)
            self.arena.retain(added.pages, added.held)
            self.sequences.append(added)
        self.ids.forget()
        self._loosen()

    def reset(self) -> None:
        """Forget every sequence; what no snapshot uses is given back."""
        self._replace([])
        self.compact()
        self.page_ids()

    def view(self, lengths: Tensor | None = None, tell: Tell = tell, spare: int = 0) -> StoreView:
        """What attention reads, tables where the rows are.

        ``lengths``: those to use instead of the sequences' own. ``tell`` and ``spare``: see :class:`PageIds`.
        """
        records, slabs, exact = (pool.data[0] for pool in self.arena.pools)
        if lengths is None:
            now = [s.length for s in self.sequences]
            if now != self._lengths[0]:
                self._lengths = now, torch.tensor(now, dtype=torch.int32).to(self.device)
            lengths = self._lengths[1]
        ids = self.ids.on_device([s.pages for s in self.sequences], tell, spare)
        return StoreView(self.layout, records, slabs, exact, self.arena.device_table(tell), ids, lengths, self.window)

    def page_ids(self) -> Tensor:
        """Page ids of every sequence, int32 ``[B, P]`` on the CPU, padded with -1."""
        return self.ids.on_cpu([s.pages for s in self.sequences])

    def last_keys(self, sequence: int, tokens: int) -> Tensor:
        """The last keys of a sequence, ``[H, n, D]``, as far as their exact rows are kept."""
        found: list[Tensor] = []
        for page in reversed(self.sequences[sequence].pages):
            slot, rows = self.arena.cell(page, EXACT), self.arena.cell(page, ROWS)
            if slot < 0 or tokens <= 0:
                break
            found.insert(0, self.arena.exact.data[0][slot, 0, :, max(0, rows - tokens) : rows])
            tokens -= rows
        return (
            torch.cat(found, 1)
            if found
            else self.arena.exact.data[0].new_empty(self.layout.n_heads, 0, self.layout.head_dim)
        )

    def memory(self) -> dict[str, int]:
        """Allocated bytes by kind."""
        total = self.arena.memory()
        self.page_ids()
        total["page_tables"] += self.ids.n_bytes
        return total

    def history_bits(self) -> tuple[int, int]:
        """Bits and elements (K and V) of the rows that attention of the next token reads packed."""
        h, d = self.layout.n_heads, self.layout.head_dim
        n_bytes = elements = 0
        for sequence in self.sequences:
            first_exact = self.window.exact_from(sequence.length)
            for page in sequence.pages:
                row = self.arena.table[page].tolist()
                if row[TIER] == 0 or (row[EXACT] >= 0 and (row[START] < self.window.sink or row[START] >= first_exact)):
                    continue
                slabs = sum(slot >= 0 for slot in row[FINE:EXACT])
                n_bytes += self.layout.record_bytes + slabs * self.layout.slab_bytes
                elements += 2 * h * d * row[ROWS]
        return n_bytes * 8, elements

    def tier_sum(self) -> tuple[int, int]:
        """Bits of K and V together over the closed pages of all sequences, and how many pages those are."""
        ids = torch.tensor([p for s in self.sequences for p in s.pages], dtype=torch.long)
        tiers = self.arena.table[ids, TIER : TIER + 2]
        return int(tiers.sum()), int((tiers[:, 0] > 0).sum())

    def exact_candidates(self) -> list[tuple[int, int, int]]:
        """Exact rows of closed pages that may be dropped: (rank, start, page), the least needed first.

        Rank 0: kept for rolling back alone; 1: recent; 2: first tokens. Rows that a snapshot counts on stay.
        """
        ids = {p for s in self.sequences for p in s.pages} - {
            p for taken in self.snapshots for s in taken for p in s.pages
        }
        first = min((self.window.exact_from(s.length) for s in self.sequences), default=0)
        found = []
        for page in sorted(ids):
            row = self.arena.table[page].tolist()
            if row[TIER] and row[EXACT] >= 0:
                start = row[START]
                found.append((2 if start < self.window.sink else int(start >= first), start, page))
        return sorted(found)

    def shed_exact(self, page: int) -> int:
        """Drop a closed page's exact rows, which are read from codes then; returns the bytes that become free."""
        for sequence in self.sequences:
            sequence.held = [p for p in sequence.held if p != page]
        return self.arena.shed_exact(page)

    def compact(self) -> None:
        """Give the free slots of all pools back to the budget."""
        moved = self.arena.compact()
        self.version += 1
        if moved:
            for sequence in self._everyone():
                sequence.pages = [moved.get(p, p) for p in sequence.pages]
                sequence.held = [moved.get(p, p) for p in sequence.held]
            self.ids.forget()

    def _everyone(self) -> Iterator[Sequence]:
        """Sequences of the batch and of all snapshots."""
        yield from self.sequences
        for snapshot in self.snapshots:
            yield from snapshot

    def _replace(self, sequences: list[Sequence]) -> None:
        self.version += 1
        for s in sequences:
            self.arena.retain(s.pages, s.held)
        for s in self.sequences:
            self.arena.release(s.pages, s.held)
        self.sequences = sequences
        self.ids.forget()
        self._loosen()

    def _loosen(self) -> None:
        if self.arena.is_loose and not self.holds_storage:
            self.compact()

    def _is_past(self, page: int, first: int) -> bool:
        """Whether a held page is closed and starts before ``first``."""
        return self.arena.cell(page, START) < first and self.arena.cell(page, TIER) != 0

    def _check_shape(self, k: Tensor, v: Tensor) -> None:
        h, d = self.layout.n_heads, self.layout.head_dim
        batch = len(self.sequences) or k.shape[0]
        if k.shape != v.shape or k.dim() != 4 or (k.shape[0], k.shape[1], k.shape[3]) != (batch, h, d):
            raise CacheStateError(
                f"{self.name}: keys {tuple(k.shape)} and values {tuple(v.shape)} do not fit a cache of {batch} "
                f"sequences with {h} KV heads of dimension {d}; use a new cache for another batch"
            )
        if k.dtype != self.arena.dtype:
            raise CacheStateError(f"{self.name}: rows are {k.dtype}, the cache holds {self.arena.dtype}")

    def _check_finite(self, k: Tensor, v: Tensor, rows: list[tuple[Tensor, Tensor]]) -> None:
        if bool(torch.isfinite(k.sum(dtype=torch.float64) + v.sum(dtype=torch.float64))):
            return
        for b, pair in enumerate(rows):
            for side, x in zip(("key", "value"), pair):
                bad = (~torch.isfinite(x)).nonzero()
                if len(bad):
                    head, t, _ = bad[0].tolist()
                    position = t + (self.sequences[b].length if self.sequences else 0)
                    raise NonFiniteError(
                        f"{self.name}: the {side} row of sequence {b}, KV head {head}, position {position} holds NaN "
                        "or Inf; the model's weights or inputs are damaged, or its dtype overflows (try bfloat16)"
                    )

    def _make_room(self, tokens: list[int], cut: Cut | None) -> tuple[tuple[int, int], int]:
        """Reserve slots for rows, giving up as little as goes.

        Returns the bits of pages that close, and which of these keep their exact rows, see :class:`Cut`.
        """
        wanted = self.tiers()
        for choice in CUTS if cut is None else (cut,):
            bits = _cut_bits(wanted, choice)
            try:
                self.arena.reserve(*self._append_slots(tokens, bits, choice.windows), ranks=choice.ranks)
            except MemoryBudgetError:
                if choice in (cut, CUTS[-1]):
                    raise
            else:
                return bits, choice.windows
        raise AssertionError("unreachable")

    def _append_slots(self, tokens: list[int], bits: tuple[int, int], windows: int) -> tuple[int, int, int, int]:
        """Slots that appending ``tokens[b]`` rows to each sequence can take, as :meth:`Arena.reserve` counts them."""
        pages = exact = closing = 0
        widths = []
        shared: Counter[int] = Counter()
        sequences = self.sequences or [Sequence() for _ in tokens]
        last, is_open = self._last_pages(sequences)
        rows_of = self.arena.table[last, ROWS].tolist() if len(self.arena.table) else [0] * len(sequences)
        for s, n, has_room, in_use in zip(sequences, tokens, is_open.tolist(), rows_of):
            rows = in_use if has_room else 0
            first = s.length + (PAGE_TOKENS - rows if has_room else 0)
            starts = range(first, s.length + n, PAGE_TOKENS)
            pages += len(starts)
            exact += sum(self._keeps_exact(start, s.length + n, windows) for start in starts)
            closing += (rows + n) // PAGE_TOKENS
            widths.append(len(s.pages) + len(starts))
            if has_room and n:
                shared[s.pages[-1]] += 1
        users = self.arena.counts[list(shared), USERS].tolist() if shared else []
        copies = sum(min(n, most - 1) for n, most in zip(shared.values(), users))
        slabs = closing * slabs_beyond_base(bits)
        return pages + copies, slabs, exact + copies, self.ids.growth(widths)

    def _extend_slots(self, other: "LayerStore") -> tuple[int, int, int, int]:
        """Slots that adding another store's sequences takes."""
        pages = list({p for s in other.sequences for p in s.pages})
        slabs, _ = other.arena.slots_of(pages)
        ids = self.ids.growth([len(s.pages) for s in [*self.sequences, *other.sequences]])
        return len(pages), slabs, len(self._exact_of(other, pages)), ids

    def _exact_of(self, other: "LayerStore", pages: list[int]) -> list[int]:
        """Those of another store's pages whose exact rows its sequences need, and not just a snapshot over there."""
        held = {p for s in other.sequences for p in s.held}
        return [
            p
            for p in pages
            if p in held or (other.arena.cell(p, START) < self.window.sink and other.arena.cell(p, EXACT) >= 0)
        ]

    def _crop_slots(self, lengths: list[int]) -> tuple[int, int, int, int]:
        """Slots that cropping takes: copies of pages that are cut and that others use too, less what becomes free."""
        cut: Counter[int] = Counter()
        gone: Counter[int] = Counter()
        for s, length in zip(self.sequences, lengths, strict=True):
            starts = self.arena.table[s.pages, START].tolist() if length < s.length else []
            kept = sum(start < length for start in starts)
            cut.update(s.pages[:kept][-1:] if starts else [])
            gone.update(s.pages[kept:] if starts else [])
        freed = [page for page, n in gone.items() if n == self.arena.users(page)]
        slabs, exact = (-n for n in self.arena.slots_of(freed))
        pages = -len(freed)
        for page, n in cut.items():
            n = min(n, self.arena.users(page) - 1)
            has_slabs, has_exact = self.arena.slots_of([page])
            pages, exact = pages + n, exact + n * has_exact
            if not has_exact:
                slabs += n * has_slabs
        return max(pages, 0), max(slabs, 0), max(exact, 0), 0

    def _keeps_exact(self, start: int, length: int, windows: int) -> bool:
        """Whether a page keeps its exact rows while the next query is at position ``length``: open, or in a window."""
        first = self.window.kept_from(length) if windows == 3 else self.window.exact_from(length)
        in_window = (windows >= 1 and start < self.window.sink) or (windows >= 2 and start >= first)
        return start + PAGE_TOKENS > length or in_window

    def _last_pages(self, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
        """Last page of every sequence, 0 for none, and whether it is open: int64 and bool ``[B]``."""
        last = torch.tensor([s.pages[-1] if s.pages else 0 for s in sequences], dtype=torch.long)
        there = torch.tensor([bool(s.pages) for s in sequences], dtype=torch.bool)
        return last, there & (self.arena.table[last, TIER] == 0) if bool(there.any()) else there

    def _open_page(self, sequence: Sequence) -> int | None:
        """The page that the sequence's next row goes to, if it is there already."""
        if sequence.pages and self.arena.cell(sequence.pages[-1], TIER) == 0:
            return sequence.pages[-1]
        return None

    def _append_one(self, b: int, k: Tensor, v: Tensor, filled: list[FilledPages], windows: int) -> list[int]:
        """Write rows ``[H, T, D]`` to a sequence's pages; those that fill up are added to ``filled``.

        Returns the first positions of pages that should keep their exact rows and do not, see :class:`Cut`.
        """
        sequence, tokens = self.sequences[b], k.shape[1]
        page = self._open_page(sequence)
        done = 0
        if page is not None and tokens:
            if self.arena.users(page) > 1:
                self._own(sequence, self.arena.cell(page, ROWS))
                page = sequence.pages[-1]
            done = self._fill(page, k, v, filled)
        first, sequence.length = sequence.length + done, sequence.length + tokens
        starts = list(range(first, sequence.length, PAGE_TOKENS))
        if not starts:
            return []
        exact = [self._keeps_exact(start, sequence.length, windows) for start in starts]
        pages = self._start_pages([b] * len(starts), starts, exact)
        for i, page in enumerate(pages):
            if exact[i]:
                rows = slice(done + i * PAGE_TOKENS, done + (i + 1) * PAGE_TOKENS)
                self.arena.write(page, 0, k[:, rows], v[:, rows])
        whole = (tokens - done) // PAGE_TOKENS
        self.arena.set_rows(pages[:whole], PAGE_TOKENS)
        if whole < len(pages):
            self.arena.set_rows(pages[whole:], (tokens - done) % PAGE_TOKENS)
        if whole:
            rows = slice(done, done + whole * PAGE_TOKENS)
            filled.append(FilledPages(pages[:whole], by_page(k[:, rows]), by_page(v[:, rows])))
        kept = [self._keeps_exact(start, sequence.length, CUTS[0].windows) for start in starts]
        return [start for start, has, should in zip(starts, exact, kept) if should and not has]

    def _fill(self, page: int, k: Tensor, v: Tensor, filled: list[FilledPages]) -> int:
        """Write the first of these rows to an open page, as many as it takes; returns their number."""
        rows = self.arena.cell(page, ROWS)
        n = min(PAGE_TOKENS - rows, k.shape[1])
        self.arena.write(page, rows, k[:, :n], v[:, :n])
        self.arena.set_rows([page], rows + n)
        if rows + n == PAGE_TOKENS:
            rows_of = self.arena.exact.data[0][self.arena.cell(page, EXACT), :, None]
            filled.append(FilledPages([page], rows_of[0], rows_of[1]))
        return n

    def _start_pages(self, rows: list[int], starts: list[int], exact: list[bool]) -> list[int]:
        """Open pages at the ends of sequences ``rows``, one for each entry."""
        held = [has and start >= self.window.sink for start, has in zip(starts, exact)]
        pages = self.arena.open(starts, exact, held)
        at = []
        for b, page, holds in zip(rows, pages, held):
            sequence = self.sequences[b]
            at.append(len(sequence.pages))
            sequence.pages.append(page)
            sequence.held += [page] * holds
        self.ids.add(rows, at, pages)
        return pages

    def _own(self, sequence: Sequence, rows: int) -> None:
        """Replace the sequence's last page, which others use too, by a copy of its first ``rows`` rows."""
        page = sequence.pages[-1]
        held = self.arena.cell(page, EXACT) >= 0 and self.arena.cell(page, START) >= self.window.sink
        copy = self.arena.copy(page, rows, held=held)
        gone = [p for p in sequence.held if p == page]
        sequence.pages[-1] = copy
        sequence.held = [p for p in sequence.held if p != page] + [copy] * held
        self.arena.release([page], gone)
        self.ids.forget()

    def _drop_tail(self, sequence: Sequence, length: int) -> None:
        """Give up the pages behind a length."""
        starts = self.arena.table[sequence.pages, START].tolist()
        gone = [p for p, start in zip(sequence.pages, starts) if start >= length]
        self.arena.release(gone, [p for p in sequence.held if p in set(gone)])
        sequence.pages, sequence.length = sequence.pages[: len(starts) - len(gone)], length
        sequence.held = [p for p in sequence.held if p not in set(gone)]
        self.ids.forget()

    def _cut_last(self, sequence: Sequence, length: int) -> None:
        """Cut the last page to a length, and hold exact rows again that are there and near it."""
        kept = sequence.pages
        if not kept:
            return
        starts = self.arena.table[kept, START].tolist()
        rows = length - starts[len(kept) - 1]
        if rows < self.arena.cell(kept[-1], ROWS):
            if self.arena.users(kept[-1]) > 1:
                self._own(sequence, rows)
            else:
                self.arena.set_rows([kept[-1]], rows)
                if self.arena.cell(kept[-1], EXACT) >= 0:
                    self.arena.reopen(kept[-1])
        first = max(self.window.sink, self.window.kept_from(length))
        again = [
            p
            for p, start in zip(sequence.pages, starts)
            if start >= first and self.arena.cell(p, EXACT) >= 0 and p not in sequence.held
        ]
        self.arena.retain([], again)
        sequence.held = [p for p in sequence.pages if p in {*sequence.held, *again}]

    def _close(self, filled: list[FilledPages], bits: tuple[int, int], missed: list[int]) -> None:
        """Encode full pages; those at ``missed`` lack exact rows that they should keep."""
        if not filled:
            return
        self.writer.write(self.arena, filled, bits)
        if self.on_close is not None:
            pages = [page for one in filled for page in one.pages]
            self.on_close(self.arena.table[pages, START].tolist(), bits, missed)


def _cut_bits(wanted: tuple[int, int], cut: Cut) -> tuple[int, int]:
    return min(wanted[0], cut.bits), min(wanted[1], cut.bits)
