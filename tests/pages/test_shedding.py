"""Under a byte budget: planes go, least predicted loss first; never above the budget; an error loses nothing."""

from typing import Any

import numpy as np
import pytest
import torch

import oracle
from helpers import (
    EXACT,
    FINE,
    FINEST,
    TIER,
    check_slots,
    generator,
    layer_profile,
    make_store,
    oracle_basis,
    page_contents,
    random_rows,
    relative_error,
    storage_bytes,
    stored,
    without_exact,
)  # fmt: skip
from lamina.attention.blocked import attend_blocked
from lamina.attention.cpu import attend_cpu
from lamina.basis.encoder import PageEncoder
from lamina.codec import CodecConfig
from lamina.errors import MemoryBudgetError
from lamina.pages import Budget, LayerStore, WindowConfig
from lamina.pages.pager import Pager, attach_pager

DIM, HEADS, LAYERS, BATCH = 32, 2, 3, 2
TIERS = [(8, 8), (4, 8), (8, 4)]
WINDOW = WindowConfig(64, 64, 64)
Rows = list[tuple[torch.Tensor, torch.Tensor]]


class Cache:
    """Three layers that share a budget, fed in step."""

    def __init__(self, max_bytes: int | None) -> None:
        self.budget = Budget(max_bytes)
        self.stores: list[LayerStore] = []
        for i in range(LAYERS):
            store, basis = make_store(
                HEADS, DIM, tiers=TIERS[i], window=WINDOW, budget=self.budget, profile=layer_profile(HEADS, DIM, i)
            )
            self.stores.append(store)
        self.basis = basis
        self.pager: Pager = attach_pager(self.budget, lambda: self.stores)

    @property
    def bytes(self) -> int:
        return sum(storage_bytes(s) for s in self.stores)

    def append(self, rows: Rows, start: int, end: int) -> None:
        for store, (k, v) in zip(self.stores, rows):
            store.append(k[:, :, start:end], v[:, :, start:end])

    def candidates(self) -> list[tuple[float, int]]:
        return [(loss, start) for s in self.stores for loss, start, _, _ in s.arena.shed_candidates()]


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Rows of growing size, so that predicted losses differ from layer to layer and page to page."""
    found = []
    for i in range(LAYERS):
        k, v = random_rows(BATCH, HEADS, 900, DIM, seed=i)
        found.append((k * (1 + i), v * torch.linspace(0.5, 2, 900)[:, None]))
    return found


@pytest.fixture(scope="module")
def sizes(rows: Rows) -> tuple[int, int]:
    """Bytes at 900 tokens with no plane shed, and with all of them shed."""
    cache = Cache(None)
    for at in range(0, 900, 60):
        cache.append(rows, at, at + 60)
    full = cache.bytes
    for store in cache.stores:
        for _ in range(2):
            for *_, page, side in store.arena.shed_candidates():
                store.arena.shed(page, side)
        store.compact()
    assert not cache.candidates()
    return full, cache.bytes


@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.98])
@pytest.mark.parametrize("chunk", [1, 60])
def test_the_budget_holds_at_every_step(rows: Rows, sizes: tuple[int, int], share: float, chunk: int) -> None:
    full, least = sizes
    cache = Cache(int(least + share * (full - least)) + 40_000)
    planes: dict[Any, Any] = {}
    for at in range(0, 900, chunk):
        cache.append(rows, at, min(900, at + chunk))
        assert cache.bytes <= cache.budget.max_bytes
        assert sum(sum(s.memory().values()) for s in cache.stores) == cache.bytes == cache.budget.used
        for i, store in enumerate(cache.stores):
            for page in (p for s in store.sequences for p in s.pages):
                row = store.arena.table[page].tolist()
                left = sum(x >= 0 for x in row[FINE:EXACT])
                assert row[TIER : TIER + 2] in ([0, 0], list(TIERS[i]))
                assert left <= planes.get((i, page), 99), "a plane never comes back"
                if row[TIER]:
                    planes[i, page] = left
    assert cache.pager.planes_shed > 0 or share > 0.5
    for store in cache.stores:
        check_slots(store)


def test_the_least_loss_goes_first_and_nothing_more_than_needed(rows: Rows, sizes: tuple[int, int]) -> None:
    full, least = sizes
    cache = Cache((full + least) // 2)
    order: list[float] = []
    for store in cache.stores:

        def shed(page: int, side: int, store: LayerStore = store, drop: Any = store.arena.shed) -> int:
            candidate = store.arena.shed_candidate(page, side)
            assert candidate == min(cache.candidates())
            assert candidate is not None
            order.append(candidate[0])
            return drop(page, side)

        store.arena.shed = shed  # type: ignore[method-assign]
    for at in range(0, 900, 60):
        cache.append(rows, at, at + 60)
    assert len(order) == cache.pager.planes_shed > 20
    assert len({round(x, 9) for x in order}) > 20
    # one plane is at most two slots, so the last round may not have freed more than that beyond what was short
    assert cache.budget.max_bytes is not None
    assert cache.budget.max_bytes - cache.bytes < sum(
        2 * s.arena.slabs.slot_bytes + s.arena.exact.slot_bytes for s in cache.stores
    )


def least_bytes(rows: Rows, tokens: int) -> int:
    """Bytes with base planes alone, and exact rows of open pages alone."""
    cache = Cache(None)
    cache.append(rows, 0, tokens)
    for store in cache.stores:
        for _ in range(2):
            for *_, page, side in store.arena.shed_candidates():
                store.arena.shed(page, side)
        for *_, page in store.exact_candidates():
            store.shed_exact(page)
        store.compact()
        store.page_ids()
    return cache.bytes


@pytest.mark.parametrize("chunk", [1, 60, 64, 130])
def test_exact_rows_go_when_no_plane_is_left(rows: Rows, chunk: int) -> None:
    """Down to base planes and open pages; roll-back rows first, then recent ones, the first tokens' last."""
    tokens = 850
    least, closing = least_bytes(rows, tokens), 3 * 2 * (chunk > 1) * 2 * HEADS * 64 * DIM * 4
    cache = Cache(least + closing)
    dropped: list[tuple[int, int, str]] = []

    def on_shed(name: str, start: int, what: str, bits: Any, loss: Any) -> None:
        i = next(i for i, s in enumerate(cache.stores) if s.name == name) if name != "layer 0" else 0
        length = cache.stores[i].sequences[0].length
        if what == "exact":
            assert not cache.candidates() and bits == (2, 2) and loss is None
            dropped.append((0 if 64 <= start < WINDOW.exact_from(length) else 2 if start < 64 else 1, start, what))

    cache.pager.on_shed = on_shed
    for at in range(0, tokens, chunk):
        cache.append(rows, at, min(tokens, at + chunk))
        assert cache.bytes <= cache.budget.max_bytes  # type: ignore[operator]
    assert len(dropped) == cache.pager.exact_shed > 3
    assert any(rank < 2 for rank, *_ in dropped) and (chunk > 1 or any(rank == 2 for rank, *_ in dropped))
    store = cache.stores[-1]
    check_slots(store)
    assert sum(x >= 0 for x in store.arena.table[store.sequences[0].pages][:, EXACT].tolist()) <= (
        1 if chunk == 1 else 4
    )
    q = torch.randn(BATCH, 4, 8, DIM, generator=generator(0))
    expected = oracle.attend(q.numpy(), stored(store.view()), oracle_basis(cache.basis))[0]
    assert relative_error(attend_cpu(q, store.view(), cache.basis).out.numpy(), expected) < 2e-3
    lengths = [tokens - 100] * BATCH
    for s in cache.stores:
        s.crop(lengths)
    cache.append(rows, tokens - 100, tokens - 60)
    assert [s.length for s in cache.stores[0].sequences] == [tokens - 60] * BATCH


def test_exact_rows_of_a_snapshot_stay(rows: Rows) -> None:
    store, _ = make_store(HEADS, DIM, tiers=(4, 4), window=WINDOW)
    k, v = rows[0]
    store.append(k[:, :, :300], v[:, :, :300])
    free = store.exact_candidates()
    expected = [(0, 128), (1, 192), (2, 0)]
    assert [(rank, start) for rank, start, _ in free] == [x for x in expected for _ in range(BATCH)]
    taken = store.snapshot()
    assert store.exact_candidates() == []
    store.append(k[:, :, 300:400], v[:, :, 300:400])
    assert {start for _, start, _ in store.exact_candidates()} == {256, 320}
    store.forget(taken)
    assert {start for _, start, _ in store.exact_candidates()} == {0, 128, 192, 256, 320}


@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 8), (4, 4), (2, 2)])
def test_predicted_losses(bits: tuple[int, int]) -> None:
    """K: half the variance that the dropped bits add to a logit. V: their error relative to the rows' energy."""
    profile = layer_profile(HEADS, DIM, seed=4)
    encoder = PageEncoder(profile, CodecConfig(), DIM**-0.5, "cpu")
    k, v = random_rows(3, HEADS, 64, DIM)
    pages = encoder.encode(k, v, *bits)
    loss = encoder.shed_loss(*(e.truncation_mse for e in pages)).numpy()
    t = profile.transform
    targets = k @ t.k_forward, (v - t.mean_v[:, None]) @ t.v_forward
    for side, (e, x, weight) in enumerate(
        zip(pages, targets, (profile.q_energy / DIM / 2, DIM / profile.v_energy), strict=True)
    ):
        x = x.double().numpy()
        if e.center is not None:
            x = x - (e.center.double().numpy() * oracle.read_scale16(e.center_scale.numpy())[..., None])[:, :, None]
        codes = oracle.unpack([s.numpy() for s in e.slabs])
        scale, mid = oracle.read_scale16(e.scale.numpy()), oracle.read_bf16(e.mid.view(torch.int16).numpy())
        full = ((x - oracle.decode(codes, scale, mid, e.bits, e.bits)) ** 2).mean((-1, -2))
        for i, read in enumerate((2, 4)):
            expected = np.zeros(3)
            if read < e.bits:
                gain = oracle.read_scale16(e.gain.numpy())[..., i, None]
                cut = oracle.decode(codes >> (e.bits - read), scale, mid, read, read, gain * 2.0 ** (e.bits - read))
                expected = ((((x - cut) ** 2).mean((-1, -2)) - full) * weight.numpy()).mean(1)
            np.testing.assert_allclose(loss[:, side, i], expected, rtol=1e-3)


def test_a_candidates_loss_is_that_of_what_is_read_next() -> None:
    """An 8-bit page is read at 4 bits after one drop and at 2 after the next; K and V have losses of their own."""
    store, _ = make_store(HEADS, DIM, tiers=(8, 4), profile=layer_profile(HEADS, DIM, seed=4))
    k, v = random_rows(1, HEADS, 200, DIM)
    store.append(k, v)
    encoder = store.writer.encoder
    pages = [(k[0, :, at : at + 64], v[0, :, at : at + 64]) for at in (0, 64, 128)]
    encoded = encoder.encode(*(torch.stack(x) for x in zip(*pages)), 8, 4)
    loss = encoder.shed_loss(*(e.truncation_mse for e in encoded))
    assert bool((loss[:, 0, 0] > loss[:, 0, 1]).all() and (loss[:, 0, 1] > 0).all() and (loss[:, 1, 0] > 0).all())
    for i, page in enumerate(store.sequences[0].pages[:3]):
        assert store.arena.shed_candidate(page, 1) == (pytest.approx(float(loss[i, 1, 0])), 64 * i)
        for left in (1, 0):
            assert store.arena.shed_candidate(page, 0) == (pytest.approx(float(loss[i, 0, left])), 64 * i)
            assert store.arena.shed(page, 0) == (2 if left else 1) * store.arena.slabs.slot_bytes
        assert store.arena.shed_candidate(page, 0) is None
    assert [c[3] for c in store.arena.shed_candidates()] == [1, 1, 1], "no open page, no K plane"


def test_shed_pages_are_still_read_right(rows: Rows, sizes: tuple[int, int]) -> None:
    cache = Cache(int(0.7 * sizes[1] + 0.3 * sizes[0]))
    for at in range(0, 900, 60):
        cache.append(rows, at, at + 60)
    store = cache.stores[-1]
    planes = (store.arena.table[store.sequences[0].pages][:, [FINE, FINE + 1, FINEST, FINEST + 2]] >= 0).tolist()
    assert len({tuple(x) for x in planes}) > 2, "pages of several depths"
    q = torch.randn(BATCH, 4, 8, DIM, generator=generator(0))
    chunk = tuple(x[:, :, -8:] for x in rows[-1])
    expected = oracle.attend(q.numpy(), stored(store.view()), oracle_basis(cache.basis))[0]
    assert relative_error(attend_cpu(q, store.view(), cache.basis).out.numpy(), expected) < 2e-3
    expected = oracle.attend(q.numpy(), stored(store.view()), oracle_basis(cache.basis), [x.numpy() for x in chunk])[0]
    blocked = attend_blocked(q, store.view(), cache.basis, chunk)  # type: ignore[arg-type]
    assert relative_error(blocked.out.numpy(), expected) < 2e-3


@pytest.mark.parametrize("chunk", [1, 64, 100])
def test_an_error_means_that_nothing_is_left_to_shed(rows: Rows, chunk: int) -> None:
    """The message says so; giving up earlier would fail requests that fit."""
    k, v = rows[0]
    limits, failed = range(40_000, 530_000, 14_000), 0
    for max_bytes in limits:
        budget = Budget(max_bytes)
        store, _ = make_store(HEADS, DIM, tiers=(8, 4), window=WINDOW, budget=budget)
        attach_pager(budget, lambda store=store: [store])
        try:
            for at in range(0, 450, chunk):
                store.append(k[:, :, at : at + chunk], v[:, :, at : at + chunk])
        except MemoryBudgetError as e:
            failed += 1
            assert "every plane and exact row that may be shed is gone" in str(e)
            assert not store.arena.shed_candidates(), f"max_bytes={max_bytes}, {at} tokens"
            assert not store.exact_candidates(), f"max_bytes={max_bytes}, {at} tokens"
    assert 0 < failed < len(limits)


def test_after_an_error_the_store_is_as_before_and_usable(rows: Rows) -> None:
    """One layer, so that the error cannot leave layers of different lengths."""
    k, v = rows[0]
    budget = Budget(200_000)
    store, _ = make_store(HEADS, DIM, tiers=(8, 8), window=WINDOW, budget=budget)
    attach_pager(budget, lambda: [store])
    at = 0
    with pytest.raises(MemoryBudgetError, match=r"max_bytes=200,000 is too small: \d{3},\d{3} bytes are needed now"):
        while True:
            before = [page_contents(store, b) for b in range(BATCH)] if at else []
            store.append(k[:, :, at : at + 40], v[:, :, at : at + 40])
            at += 40
    assert at > 90 and [s.length for s in store.sequences] == [at] * BATCH
    check_slots(store)
    assert storage_bytes(store) == budget.used <= 200_000
    for b in range(BATCH):
        now = page_contents(store, b)
        for x, y in zip(without_exact(now), without_exact(before[b]), strict=True):
            assert {**x, "slabs": []} == {**y, "slabs": []}
            for left, had in zip(x.get("slabs", []), y.get("slabs", [])):
                assert left == had[: len(left)], "planes may be gone, the least significant first"
    store.crop([at - 70] * len(store.sequences))
    store.append(k[:, :, at - 70 : at - 30], v[:, :, at - 70 : at - 30])
    assert store.sequences[0].length == at - 30


def test_a_budget_too_small_for_the_first_page_says_so(rows: Rows) -> None:
    k, v = rows[0]
    store, _ = make_store(HEADS, DIM, budget=Budget(1000))
    with pytest.raises(MemoryBudgetError, match=r"max_bytes=1,000 is too small.*raise max_bytes, or use fewer tokens"):
        store.append(k[:, :, :1], v[:, :, :1])
    assert storage_bytes(store) == 0


@pytest.mark.parametrize("tokens", [1, 64, 200])
def test_the_last_byte_counts(rows: Rows, tokens: int) -> None:
    """Page ids included: exactly enough is enough, one byte less is not."""
    k, v = (x[:, :, :tokens] for x in rows[0])
    store, _ = make_store(HEADS, DIM, tiers=(2, 2), window=WindowConfig(0, 0, 0))
    store.append(k, v)
    needed = storage_bytes(store)
    exactly, _ = make_store(HEADS, DIM, tiers=(2, 2), window=WindowConfig(0, 0, 0), budget=Budget(needed))
    exactly.append(k, v)
    assert storage_bytes(exactly) == needed
    less, _ = make_store(HEADS, DIM, tiers=(2, 2), window=WindowConfig(0, 0, 0), budget=Budget(needed - 1))
    with pytest.raises(MemoryBudgetError, match=f"{needed:,} bytes are needed"):
        less.append(k, v)
    assert storage_bytes(less) == 0


def test_pages_that_cannot_have_their_tier_are_written_with_less(rows: Rows) -> None:
    """Encoded afresh at what fits, which is better than a cut page, and said so."""
    k, v = (x[:, :, :64] for x in rows[0])
    sizes = {}
    for tiers in ((8, 8), (4, 4), (2, 2)):
        store, _ = make_store(HEADS, DIM, tiers=tiers)
        store.append(k, v)
        sizes[tiers] = storage_bytes(store)
    for budget, written in ((sizes[8, 8], 8), (sizes[8, 8] - 1, 4), (sizes[4, 4] - 1, 2)):
        store, _ = make_store(HEADS, DIM, tiers=(8, 8), budget=Budget(budget))
        closed: list[tuple[int, int]] = []
        store.on_close = lambda starts, bits, missed, closed=closed: closed.append(bits)
        store.append(k, v)
        assert closed == [(written, written)] and storage_bytes(store) == sizes[written, written]


def exact_starts(store: LayerStore) -> list[int]:
    rows = store.arena.table[store.sequences[0].pages].tolist()
    return [row[0] for row in rows if row[EXACT] >= 0]


def test_a_byte_too_few_costs_what_is_needed_least(rows: Rows) -> None:
    """A prompt: roll-back rows first, then recent ones, then the first tokens'; nothing that still fits."""
    k, v = (x[:1, :, :850] for x in rows[0])
    window = WindowConfig(64, 256, 64)
    free, _ = make_store(HEADS, DIM, tiers=(2, 2), window=window)
    free.append(k, v)
    assert exact_starts(free) == [0, 512, 576, 640, 704, 768, 832]
    slot, needed = free.arena.exact.slot_bytes, storage_bytes(free)
    for short, left in ((1, [0, 576, 640, 704, 768, 832]), (slot + 1, [0, 832]), (5 * slot + 1, [832])):
        store, _ = make_store(HEADS, DIM, tiers=(2, 2), window=window, budget=Budget(needed - short))
        missed: list[int] = []
        store.on_close = lambda starts, bits, lost, missed=missed: missed.extend(lost)
        attach_pager(store.budget, lambda store=store: [store])
        store.append(k, v)
        assert exact_starts(store) == left, short
        assert sorted([*left, *missed]) == exact_starts(free)


def test_old_recent_rows_go_before_the_new_ones_of_a_chunk(rows: Rows) -> None:
    k, v = (x[:1] for x in rows[0])
    window = WindowConfig(64, 256, 64)
    free, _ = make_store(HEADS, DIM, tiers=(2, 2), window=window)
    free.append(k[:, :, :850], v[:, :, :850])
    budget = Budget(None)
    store, _ = make_store(HEADS, DIM, tiers=(2, 2), window=window, budget=budget)
    attach_pager(budget, lambda: [store])
    store.append(k[:, :, :600], v[:, :, :600])
    budget.max_bytes = storage_bytes(free)
    store.append(k[:, :, 600:850], v[:, :, 600:850])
    assert storage_bytes(store) <= budget.max_bytes
    assert set(exact_starts(store)) >= {0, 576, 640, 704, 768, 832}


def test_a_copy_needs_no_more_than_the_original(rows: Rows) -> None:
    """First tokens whose exact rows were shed do not count for slots."""
    k, v = (x[:, :, :330] for x in rows[0])
    store, _ = make_store(HEADS, DIM, tiers=(2, 2), window=WINDOW)
    store.append(k, v)
    for _, _, page in store.exact_candidates():
        store.shed_exact(page)
    store.compact()
    copy, _ = make_store(HEADS, DIM, tiers=(2, 2), window=WINDOW, budget=Budget(storage_bytes(store)))
    copy.extend(store)
    assert storage_bytes(copy) == storage_bytes(store)
    check_slots(copy)


def test_a_failed_first_call_leaves_the_batch_open(rows: Rows) -> None:
    k, v = (x[:, :, :50] for x in rows[0])
    store, _ = make_store(HEADS, DIM, budget=Budget(50_000))
    with pytest.raises(MemoryBudgetError):
        store.append(k, v)
    assert store.sequences == [] and storage_bytes(store) == 0
    store.append(k[:1], v[:1])
    assert [s.length for s in store.sequences] == [50]
