"""Random operations on a cache, side by side with a simple account of what it must hold afterwards.

The account knows pages only by SPEC 4: 64 rows, opened and closed in order, exact rows kept while within reach,
cut by a crop, shared until two sequences differ. It keeps every row as the layers were given it. After each operation
the cache's bytes are read by `oracle.py` and compared with the account.
"""

import random
import tempfile
import time
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

import oracle
from helpers import EXACT, ROWS, START, TIER, check_slots, oracle_basis, relative_error, storage_bytes, stored
from lamina.attention.dispatch import KERNEL_QUERIES
from lamina.attention.types import AttentionOutput
from lamina.basis.calibrate import calibrate
from lamina.basis.profile import Profile
from lamina.codec import CodecConfig
from lamina.engines.hf import LaminaCache, Snapshot, cache_kwarg
from lamina.engines.hf_layer import LaminaLayer
from lamina.eval.arms import PUBLISHED
from lamina.pages import WindowConfig
from tiny_models import build

VOCAB, LAYERS, BITS = 96, 2, (2, 4, 8)
MAX_BATCH, MAX_TOKENS, MAX_SNAPSHOTS = 4, 420, 3
ATTENTION_ERROR = 2e-3
CODE_ERROR = {2: 0.3, 4: 0.03, 8: 4e-4}
"""Squared error of a page's codes, relative to its rows about their page mean (K) or row mean (V), by bits read."""

SETTINGS: list[tuple[tuple[int, int, int], CodecConfig]] = [
    ((64, 64, 64), CodecConfig()),
    ((0, 0, 0), CodecConfig()),
    ((64, 0, 64), CodecConfig()),
    ((0, 128, 0), PUBLISHED),
    ((128, 64, 128), CodecConfig()),
]
"""Windows and codec of a run, by its seed."""

WEIGHTS = {
    "append": 30, "decode": 14, "append padded": 14, "crop": 10, "reorder": 4, "select": 4, "repeat": 4, "snapshot": 5,
    "restore": 5, "release": 4, "copy": 3, "save and load": 3, "add": 4, "shed": 8, "tiers": 4, "reset": 1,
}  # fmt: skip


@cache
def small_model() -> tuple[PreTrainedModel, Profile]:
    """Two layers, two KV heads of dimension 16."""
    model = build(
        "Llama", hidden_size=48, intermediate_size=64, num_hidden_layers=LAYERS, head_dim=16, vocab_size=VOCAB
    )
    g = torch.Generator().manual_seed(7)
    data = [torch.randint(1, VOCAB, (2, 384), generator=g) for _ in range(2)]
    return model, calibrate(model, data, model_id="small")


# -------------------------------------------------------------------------------------------------------- the account
@dataclass(eq=False)
class Page:
    """One page of all layers: its rows, whether it is closed, and per layer what is left of it."""

    start: int
    rows: int = 0
    closed: bool = False
    read: list[list[int]] = field(default_factory=list)
    known: list[tuple[bytes, list[list[bytes]]] | None] = field(default_factory=lambda: [None] * LAYERS)

    def close(self, tiers: tuple[tuple[int, int], ...]) -> None:
        self.closed, self.read, self.known = True, [list(pair) for pair in tiers], [None] * LAYERS


@dataclass(eq=False)
class Row:
    """A sequence: its pages, those whose exact rows it needs, and the rows of every layer, ``[2, H, n, D]``."""

    pages: list[Page] = field(default_factory=list)
    held: list[Page] = field(default_factory=list)
    length: int = 0
    given: list[Tensor] = field(default_factory=lambda: [torch.empty(2, 2, 0, 16) for _ in range(LAYERS)])

    def copy(self) -> "Row":
        return Row(list(self.pages), list(self.held), self.length, list(self.given))


class Account:
    """Sequences of a cache and of its snapshots."""

    def __init__(self, window: WindowConfig) -> None:
        self.window = window
        self.rows: list[Row] = []
        self.columns: list[list[bool]] = []
        self.kept: list[tuple[list[Row], list[list[bool]]]] = []

    @property
    def seen(self) -> int:
        return len(self.columns[0]) if self.columns else 0

    def everyone(self) -> list[Row]:
        return [*self.rows, *(row for rows, _ in self.kept for row in rows)]

    def users(self, page: Page) -> int:
        return sum(page in row.pages for row in self.everyone())

    def is_exact(self, page: Page) -> bool:
        return page.start < self.window.sink or any(page in row.held for row in self.everyone())

    def append(self, real: list[list[bool]], tiers: tuple[tuple[int, int], ...]) -> None:
        if not self.rows:
            self.rows, self.columns = [Row() for _ in real], [[] for _ in real]
        self.settle()
        for row, columns, new in zip(self.rows, self.columns, real):
            columns.extend(new)
            self._append_one(row, sum(new), tiers)

    def _append_one(self, row: Row, n: int, tiers: tuple[tuple[int, int], ...]) -> None:
        end = row.length + n
        if n and row.pages and not row.pages[-1].closed and self.users(row.pages[-1]) > 1:
            self._own(row, row.pages[-1].rows)
        while row.length < end:
            if not row.pages or row.pages[-1].closed:
                row.pages.append(Page(row.length))
                stays = row.length + 64 > end or row.length >= self.window.kept_from(end)
                if stays and row.length >= self.window.sink:
                    row.held.append(row.pages[-1])
            page = row.pages[-1]
            taken = min(64 - page.rows, end - row.length)
            page.rows += taken
            row.length += taken
            if page.rows == 64:
                page.close(tiers)

    def settle(self) -> None:
        for row in self.rows:
            first = self.window.kept_from(row.length)
            row.held = [p for p in row.held if p.start >= first or not p.closed]

    def crop(self, target: int) -> None:
        self.columns = [c[:target] for c in self.columns]
        for row, columns in zip(self.rows, self.columns):
            if sum(columns) < row.length:
                self._crop_one(row, sum(columns))

    def _crop_one(self, row: Row, length: int) -> None:
        row.pages = [p for p in row.pages if p.start < length]
        row.held = [p for p in row.held if p.start < length]
        row.length, row.given = length, [x[:, :, :length] for x in row.given]
        if row.pages and row.pages[-1].start + row.pages[-1].rows > length:
            last = row.pages[-1]
            if self.users(last) > 1:
                self._own(row, length - last.start)
            else:
                last.rows = length - last.start
                last.closed = last.closed and not self.is_exact(last)
        first = max(self.window.sink, self.window.kept_from(length))
        row.held = [p for p in row.pages if p in row.held or (p.start >= first and self.is_exact(p))]

    def _own(self, row: Row, n: int) -> None:
        last = row.pages[-1]
        if self.is_exact(last):
            mine = Page(last.start, n)
        else:
            mine = Page(last.start, n, True, deepcopy(last.read), list(last.known))
        row.pages[-1] = mine
        row.held = [p for p in row.held if p is not last]
        if not mine.closed and mine.start >= self.window.sink:
            row.held.append(mine)

    def select(self, indices: list[int]) -> None:
        self.rows = [self.rows[i].copy() for i in indices]
        self.columns = [list(self.columns[i]) for i in indices]

    def snapshot(self) -> None:
        self.kept.append(([r.copy() for r in self.rows], [list(c) for c in self.columns]))

    def restore(self, i: int) -> None:
        rows, columns = self.kept[i]
        self.rows, self.columns = [r.copy() for r in rows], [list(c) for c in columns]

    def copy(self) -> "Account":
        """The sequences alone; they share pages with each other, and none with this one."""
        other = Account(self.window)
        other.rows, other.columns = deepcopy((self.rows, self.columns))
        return other

    def add(self, other: "Account") -> None:
        theirs = other.copy()
        seen = max(self.seen, theirs.seen)
        self.rows += theirs.rows
        self.columns = [[False] * (seen - len(c)) + c for c in self.columns + theirs.columns]


# -------------------------------------------------------------------------------------------------------- the watched
class WatchedLayer(LaminaLayer):
    """Tells the twin what it is given, and what it reads."""

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Tensor:
        twin: Twin = self.cache.twin
        twin.take(self.index, key, value)
        out = super().attend(module, query, key, value, mask, **kwargs)
        twin.attended(self.index, query, key, value, out)
        return out

    def read(self, query: Tensor, basis: Any, chunk: tuple[Tensor, Tensor], only: int | None) -> AttentionOutput:
        result = super().read(query, basis, chunk, only)
        self.cache.twin.compare(self, query, chunk, only, result.out)
        return result


class WatchedCache(LaminaCache):
    """A cache of watched layers."""

    layer_class = WatchedLayer
    twin: "Twin"


@dataclass
class Figures:
    """What a run found."""

    operations: Counter[str] = field(default_factory=Counter)
    attention_error: float = 0.0
    code_error: dict[int, float] = field(default_factory=lambda: dict.fromkeys(BITS, 0.0))
    outputs: int = 0
    pages: int = 0
    bytes_start: int = -1
    bytes_peak: int = 0
    bytes_end: int = -1
    seconds: float = 0.0


class Twin:
    """A cache and its account."""

    def __init__(self, window: WindowConfig, codec: CodecConfig, figures: Figures, cache: Any = None) -> None:
        model, profile = small_model()
        self.window, self.codec, self.figures = window, codec, figures
        self.cache = cache or WatchedCache(model, profile, window=window, codec=codec)
        self.cache.twin = self
        self.account = Account(window)
        self.snapshots: list[Snapshot] = []
        self.real: list[list[bool]] = []
        self.compared: set[int] = set()

    # ---------------------------------------------------------------------------------------------------- operations
    def append(self, real: list[list[bool]], ids: Tensor, bare: bool) -> None:
        """Feed ids ``[B, T]`` of which ``real`` are no padding; without a mask if ``bare`` and nothing ever was."""
        model = small_model()[0]
        self.real, self.compared = real, set()
        first = max((r.length for r in self.account.rows), default=0) == 0
        self.account.append(real, self.cache.tiers)
        mask = torch.tensor(self.account.columns)
        options: dict[str, Any] = {}
        if not (bare and bool(mask.all())):
            positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            options = {"attention_mask": mask.long(), "position_ids": positions}
        with torch.no_grad():
            model(input_ids=ids, **options, **cache_kwarg(model, self.cache))
        assert first or not any(map(any, real)) or self.compared == set(range(LAYERS))
        if ids.shape[1] > 1 and not first:
            self.account.settle()

    def crop(self, target: int) -> None:
        self.cache.crop(target if target else -self.account.seen)
        self.account.crop(target)

    def select(self, indices: list[int], how: str) -> None:
        index = torch.tensor(indices)
        {"reorder": self.cache.reorder_cache, "select": self.cache.batch_select_indices}[how](index)
        self.account.select(indices)

    def repeat(self, times: int) -> None:
        self.cache.batch_repeat_interleave(times)
        self.account.select([i for i in range(len(self.account.rows)) for _ in range(times)])

    def snapshot(self) -> None:
        self.snapshots.append(self.cache.snapshot())
        self.account.snapshot()

    def restore(self, i: int) -> None:
        self.cache.restore(self.snapshots[i])
        self.account.restore(i)

    def release(self, i: int) -> None:
        self.snapshots.pop(i).release()
        self.account.kept.pop(i)

    def copy(self) -> "Twin":
        return self._with(deepcopy(self.cache))

    def saved_and_loaded(self, folder: Path) -> "Twin":
        model, profile = small_model()
        path = folder / "kept.cache"
        self.cache.save(path)
        loaded: Any = LaminaCache.load(path, model, profile)
        loaded.__class__ = WatchedCache
        for layer in loaded.ours:
            layer.__class__ = WatchedLayer
        return self._with(loaded)

    def _with(self, cache: Any) -> "Twin":
        other = Twin(self.window, self.codec, self.figures, cache)
        other.account = self.account.copy()
        return other

    def add(self, other: "Twin") -> None:
        self.cache.add(other.cache)
        self.account.add(other.account)

    def shed(self, layer: int, choice: int) -> None:
        arena = self.cache.ours[layer].store.arena
        found = arena.shed_candidates()
        if found:
            _, _, number, side = found[choice % len(found)]
            arena.shed(number, side)
            pages = self._numbers(layer)
            left = next(page for page, n in pages.items() if n == number).read[layer]
            left[side] //= 2

    def reset(self) -> None:
        self.cache.reset()
        self.account.rows, self.account.columns = [], []

    def finish(self) -> None:
        """Release everything; no byte is left."""
        while self.snapshots:
            self.release(0)
        self.reset()
        self.figures.bytes_end = self.bytes()
        assert self.figures.bytes_end == self.cache.budget.used == self.figures.bytes_start

    # ---------------------------------------------------------------------------------------------- what layers say
    def take(self, layer: int, key: Tensor, value: Tensor) -> None:
        for b, row in enumerate(self.account.rows):
            new = torch.stack([key[b], value[b]])[:, :, torch.tensor(self.real[b])]
            row.given[layer] = torch.cat([row.given[layer], new], 2)

    def compare(self, layer: LaminaLayer, query: Tensor, chunk: Any, only: int | None, out: Tensor) -> None:
        """What was read of the pages, against the oracle on the same bytes, while every exact row is still there."""
        if layer.index not in self.compared:
            self.check_pages(layer.index, contents=False)
        self.compared.add(layer.index)
        view, own = stored(layer.store.view()), query.shape[2] > KERNEL_QUERIES
        at = slice(None) if only is None else slice(only, only + 1)
        view = replace(view, page_ids=view.page_ids[at], lengths=view.lengths[at])
        rows = tuple(x.numpy() for x in chunk) if own else None
        self._near(out, oracle.attend(query.numpy(), view, oracle_basis(layer.basis), rows)[0])

    def attended(self, layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        """The first rows of all sequences see only each other."""
        if layer in self.compared:
            return
        for b, real in enumerate(self.real):
            at = torch.tensor(real)
            q, k, v = (x[b, :, at].double().numpy() for x in (query, key, value))
            if at.any():
                self._near(out[b : b + 1, at], causal(q, k, v, self.cache.ours[layer].scaling)[None])

    def _near(self, ours: Tensor, expected: np.ndarray) -> None:
        error = relative_error(ours.double().numpy(), expected)
        assert error < ATTENTION_ERROR
        self.figures.attention_error = max(self.figures.attention_error, error)
        self.figures.outputs += expected.shape[0] * expected.shape[1]

    # --------------------------------------------------------------------------------------------------------- checks
    def check(self) -> None:
        """The cache holds what the account says, and no byte more."""
        cache, account = self.cache, self.account
        assert cache.get_seq_length() == account.seen
        assert cache.lengths == [row.length for row in account.rows] == [sum(c) for c in account.columns]
        columns = cache.padding.columns
        if all(all(c) for c in account.columns):
            assert columns is None
        else:
            assert columns is not None and columns.tolist() == account.columns
        for layer in cache.ours:
            if layer.store is not None:
                check_slots(layer.store)
                self.check_pages(layer.index, contents=True)
        memory = cache.memory()
        assert self.bytes() == cache.budget.used == sum(memory.values())
        self.figures.bytes_peak = max(self.figures.bytes_peak, self.bytes())

    def bytes(self) -> int:
        columns = self.cache.padding.columns
        padding = columns.untyped_storage().nbytes() if columns is not None else 0
        return padding + sum(storage_bytes(layer.store) for layer in self.cache.ours if layer.store is not None)

    def check_pages(self, layer: int, contents: bool) -> None:
        store = self.cache.ours[layer].store
        assert [s.length for s in store.sequences] == [row.length for row in self.account.rows]
        table = store.arena.table.tolist()
        view = stored(store.view()) if contents else None
        owners = {page: row for row in self.account.everyone() for page in row.pages}
        for page, number in self._numbers(layer).items():
            line = table[number]
            assert (line[START], line[ROWS], line[TIER] > 0) == (page.start, page.rows, page.closed)
            assert (line[EXACT] >= 0) == self.account.is_exact(page)
            if view is None:
                continue
            rows = owners[page].given[layer][:, :, page.start : page.start + page.rows]
            if line[EXACT] >= 0:
                assert torch.equal(store.arena.exact.data[0][line[EXACT]][:, :, : page.rows], rows)
            if page.closed:
                self._check_codes(view, number, page, layer, rows)

    def _numbers(self, layer: int) -> dict[Page, int]:
        """Number of every page in a layer's store: one a page, a different one for each."""
        store = self.cache.ours[layer].store
        sequences = [*store.sequences, *(s for kept in self.snapshots for s in kept.stores[layer])]
        found: dict[Page, int] = {}
        for sequence, row in zip(sequences, self.account.everyone(), strict=True):
            assert len(sequence.pages) == len(row.pages)
            for number, page in zip(sequence.pages, row.pages):
                assert found.setdefault(page, number) == number
        assert len(set(found.values())) == len(found)
        return found

    def _check_codes(self, view: oracle.Stored, number: int, page: Page, layer: int, rows: Tensor) -> None:
        """The bytes are those seen before, with fewer planes at most; new ones are codes of these rows."""
        slabs = [[view.slabs[slot].tobytes() for slot in view.slots(number, side)] for side in (0, 1)]
        now = view.defined(number).tobytes(), slabs
        assert [view.bits_read(number, side) for side in (0, 1)] == page.read[layer]
        before = page.known[layer]
        if before is not None:
            assert now[0] == before[0] and all(s == b[: len(s)] for s, b in zip(slabs, before[1]))
        if now != before:
            page.known[layer] = now
            for side in (0, 1):
                self._check_error(view, number, layer, side, rows[side].double())

    def _check_error(self, view: oracle.Stored, number: int, layer: int, side: int, rows: Tensor) -> None:
        t = small_model()[1].layers[layer].stored
        forward, mean = (t.k_forward, 0) if side == 0 else (t.v_forward, t.mean_v[:, None].double())
        expected = (rows - mean) @ forward.double()
        ours = view.read(number, side)[0][:, : rows.shape[1]]
        about = expected.mean(1 if side == 0 and self.codec.center else 2, keepdim=True)
        energy = float((expected - about).square().sum())
        bits = view.bits_read(number, side)
        if rows.shape[1] == 64:
            error = float((torch.from_numpy(ours) - expected).square().sum()) / energy
            assert error < CODE_ERROR[bits], (bits, error)
            self.figures.code_error[bits] = max(self.figures.code_error[bits], error)
        self.figures.pages += 1


def causal(q: np.ndarray, k: np.ndarray, v: np.ndarray, scaling: float) -> np.ndarray:
    """Attention of a chunk to itself, ``[T, Hq, D]``."""
    group = q.shape[0] // k.shape[0]
    x = np.einsum("htd,hsd->hts", q, k.repeat(group, 0)) * scaling
    x = np.where(np.tri(q.shape[1], dtype=bool), x, -np.inf)
    p = np.exp(x - x.max(-1, keepdims=True))
    return np.einsum("hts,hsd->thd", p / p.sum(-1, keepdims=True), v.repeat(group, 0))


# ------------------------------------------------------------------------------------------------------------- driver
class Driver:
    """Draws operations from a seed and applies them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        window, codec = SETTINGS[seed % len(SETTINGS)]
        self.figures = Figures()
        self.twin = Twin(WindowConfig(*window), codec, self.figures)
        self.figures.bytes_start = self.twin.bytes()

    def run(self, operations: int, every: int = 0) -> Figures:
        """Apply operations and check after each; print progress every so many."""
        started = time.perf_counter()
        for i in range(operations):
            name = self.step()
            self.figures.operations[name] += 1
            self.twin.check()
            if every and (i + 1) % every == 0:
                print(f"{i + 1:6d} operations, {time.perf_counter() - started:6.1f} s, {self.twin.bytes():,} bytes")
        self.twin.finish()
        self.figures.seconds = time.perf_counter() - started
        return self.figures

    def step(self) -> str:
        """One operation that is possible now; returns its name."""
        while True:
            name = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            if getattr(self, "_" + name.replace(" ", "_"))():
                return name

    @property
    def batch(self) -> int:
        return len(self.twin.account.rows)

    def _feed(self, twin: Twin, real: list[list[bool]]) -> None:
        ids = [[self.random.randrange(1, VOCAB) for _ in row] for row in real]
        twin.append(real, torch.tensor(ids), self.random.random() < 0.5)

    def _append(self) -> bool:
        batch, n = self.batch or self.random.randint(1, 3), self.random.randint(1, 150)
        if self.twin.account.seen + n > MAX_TOKENS:
            return False
        self._feed(self.twin, [[True] * n for _ in range(batch)])
        return True

    def _decode(self) -> bool:
        if not self.batch or self.twin.account.seen + 8 > MAX_TOKENS:
            return False
        self._feed(self.twin, [[True] * self.random.choice((1, 1, 2, 8))] * self.batch)
        return True

    def _append_padded(self) -> bool:
        batch, n = self.batch or self.random.randint(1, 3), self.random.randint(1, 150)
        if self.twin.account.seen + n > MAX_TOKENS:
            return False
        self._feed(self.twin, [self._padding(n) for _ in range(batch)])
        return True

    def _padding(self, n: int) -> list[bool]:
        """Padding on the left, on the right, anywhere, everywhere or nowhere."""
        kind, some = self.random.randrange(6), self.random.randint(0, n)
        if kind < 2:
            return [i >= some for i in range(n)]
        if kind == 2:
            return [i < some for i in range(n)]
        if kind == 3:
            return [self.random.random() < 0.5 for _ in range(n)]
        return [kind == 4] * n

    def _crop(self) -> bool:
        seen = self.twin.account.seen
        if not seen:
            return False
        far = self.random.random() < 0.4
        self.twin.crop(self.random.randint(0, seen - 1) if far else max(0, seen - self.random.randint(1, 64)))
        return True

    def _reorder(self) -> bool:
        if self.batch:
            self.twin.select([self.random.randrange(self.batch) for _ in range(self.batch)], "reorder")
        return self.batch > 0

    def _select(self) -> bool:
        if self.batch:
            rows = self.random.sample(range(self.batch), self.random.randint(1, self.batch))
            self.twin.select(rows, "select")
        return self.batch > 0

    def _repeat(self) -> bool:
        possible = 0 < self.batch <= MAX_BATCH // 2
        if possible:
            self.twin.repeat(self.random.randint(1, MAX_BATCH // self.batch))
        return possible

    def _snapshot(self) -> bool:
        possible = len(self.twin.snapshots) < MAX_SNAPSHOTS
        if possible:
            self.twin.snapshot()
        return possible

    def _restore(self) -> bool:
        if self.twin.snapshots:
            self.twin.restore(self.random.randrange(len(self.twin.snapshots)))
        return True

    def _release(self) -> bool:
        if self.twin.snapshots:
            self.twin.release(self.random.randrange(len(self.twin.snapshots)))
        return True

    def _copy(self) -> bool:
        """The copy and the original do not touch each other; either goes on."""
        if not self.batch or self.twin.account.seen + 70 > MAX_TOKENS:
            return False
        copy = self.twin.copy()
        self._feed(copy, [[True] * self.random.choice((1, 70))] * self.batch)
        copy.check()
        if self.random.random() < 0.5:
            self.twin = copy
        return True

    def _save_and_load(self) -> bool:
        if self.batch:
            with tempfile.TemporaryDirectory() as folder:
                self.twin = self.twin.saved_and_loaded(Path(folder))
        return self.batch > 0

    def _add(self) -> bool:
        """Another cache's sequences join; that cache goes on unchanged."""
        room = MAX_BATCH - self.batch
        if not room:
            return False
        other = Twin(self.twin.window, self.twin.codec, self.figures)
        other.cache.tiers = self.twin.cache.tiers
        batch = self.random.randint(1, min(room, 2))
        for _ in range(2):
            self._feed(other, [self._padding(self.random.randint(1, 150))] * batch)
        self.twin.add(other)
        other.check()
        return True

    def _shed(self) -> bool:
        if self.batch:
            for _ in range(self.random.randint(1, 4)):
                self.twin.shed(self.random.randrange(LAYERS), self.random.randrange(1000))
        return self.batch > 0

    def _tiers(self) -> bool:
        self.twin.cache.tiers = [(self.random.choice(BITS), self.random.choice(BITS)) for _ in range(LAYERS)]
        return True

    def _reset(self) -> bool:
        self.twin.reset()
        return True
