"""The life of pages: exact windows, roll-back, longer crops, reset, batches."""

import numpy as np
import pytest
import torch

import oracle
from helpers import (
    EXACT,
    ROWS,
    START,
    TIER,
    check_slots,
    fill,
    generator,
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
from lamina.attention.reference import attend_reference
from lamina.attention.types import ReadBasis
from lamina.errors import CacheStateError
from lamina.pages import Budget, LayerStore, WindowConfig

DIM = 32
WINDOWS = [(64, 256, 64), (64, 64, 0), (0, 128, 128), (128, 0, 0)]


def rows(tokens: int, batch: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return random_rows(batch, 2, tokens, DIM, seed=seed)


def exact_starts(store: LayerStore) -> list[int]:
    pages = store.sequences[0].pages
    return [int(store.arena.table[p, START]) for p in pages if store.arena.table[p, EXACT] >= 0]


def attention_is_right(store: LayerStore, basis: ReadBasis, k: torch.Tensor, v: torch.Tensor, tokens: int) -> None:
    """All paths against the oracle for the last ``tokens`` tokens, whose rows are the last of k and v."""
    q = torch.randn(k.shape[0], 4, tokens, DIM, generator=generator(9))
    theirs, view = oracle_basis(basis), store.view()
    chunk = k[:, :, -tokens:], v[:, :, -tokens:]
    for name, result, seen in (
        ("reference", attend_reference(q, view, basis), None),
        ("cpu", attend_cpu(q, view, basis), None),
        ("blocked", attend_blocked(q, view, basis, chunk), tuple(x.numpy() for x in chunk)),
    ):
        out, lse_packed, lse, _ = oracle.attend(q.numpy(), stored(view), theirs, seen)
        assert relative_error(result.out.double().numpy(), out) < 1e-3, name
        np.testing.assert_allclose(result.lse.numpy(), lse, atol=1e-3)
        np.testing.assert_allclose(result.lse_packed.numpy(), lse_packed, atol=1e-3)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chunk", [1, 50, 200])
def test_exact_planes_are_kept_as_long_as_needed_and_no_longer(window: tuple[int, int, int], chunk: int) -> None:
    sink, recent, rollback = window
    store, _ = make_store(2, DIM, window=WindowConfig(*window))
    k, v = rows(560)
    for at in range(0, 560, chunk):
        end = min(560, at + chunk)
        store.append(k[:, :, at:end], v[:, :, at:end])
        # every exact plane that a query of this call reads of rows before it is there
        needed = [s for s in range(0, at, 64) if s < sink or s >= 64 * (at // 64) - recent]
        assert set(needed) <= set(exact_starts(store))
        oldest_before, oldest = (64 * (t // 64) - recent - rollback for t in (at, end))
        kept = [s for s in range(0, end, 64) if s < sink or s >= (oldest_before if s < at else oldest)]
        assert exact_starts(store) == kept, "pages that a chunk opens and outruns never get an exact plane"
        store.settle()
        assert exact_starts(store) == [s for s in range(0, end, 64) if s < sink or s >= oldest]
        for page in store.sequences[0].pages:
            start, n, slot = (int(store.arena.table[page, c]) for c in (START, ROWS, EXACT))
            if slot >= 0:
                held = store.arena.exact.data[0][slot]
                assert torch.equal(held[0, :, :n], k[0, :, start : start + n])
                assert torch.equal(held[1, :, :n], v[0, :, start : start + n])
    check_slots(store)


@pytest.mark.parametrize("length", [64 * 7, 64 * 7 + 1, 64 * 7 + 37, 64 * 8 - 1])
@pytest.mark.parametrize("crop", [1, 2, 37, 63, 64])
def test_a_rollback_equals_a_fresh_run(length: int, crop: int) -> None:
    """Rejected draft tokens leave no trace: bytes, exact rows and attention."""
    k, v = rows(length)
    k2, v2 = (torch.cat([x[:, :, : length - crop], y], 2) for x, y in zip((k, v), rows(100, seed=1)))
    window = WindowConfig(64, 128, 64)
    store, basis = make_store(2, DIM, tiers=(4, 8), window=window)
    fill(store, k, v, chunk=50)
    store.settle()
    store.crop([length - crop] * len(store.sequences))
    fresh, _ = make_store(2, DIM, tiers=(4, 8), window=window)
    fill(fresh, k2[:, :, : length - crop], v2[:, :, : length - crop])
    for at in range(length - crop, k2.shape[2], 13):
        end = min(at + 13, k2.shape[2])
        for s in (store, fresh):
            s.append(k2[:, :, at:end], v2[:, :, at:end])
        q = torch.randn(1, 4, 2, DIM, generator=generator(at))
        results = [attend_reference(q, s.view(), basis) for s in (store, fresh)]
        assert torch.equal(results[0].out, results[1].out) and torch.equal(results[0].lse, results[1].lse)
        assert torch.equal(results[0].lse_packed, results[1].lse_packed)
        assert without_exact(page_contents(store, 0)) == without_exact(page_contents(fresh, 0))
    tail = rows(400, seed=2)
    for s in (store, fresh):
        fill(s, *tail, chunk=200)
        s.settle()
        check_slots(s)
    assert page_contents(store, 0) == page_contents(fresh, 0)


@pytest.mark.parametrize("target", [450, 300, 257, 256, 255, 130, 65])
def test_a_longer_crop_leaves_packed_pages_with_fewer_rows(target: int) -> None:
    k, v = rows(700)
    store, basis = make_store(2, DIM, tiers=(4, 2), window=WindowConfig(64, 128, 0))
    fill(store, k, v)
    store.settle()
    before = page_contents(store, 0)
    store.crop([target] * len(store.sequences))
    after = page_contents(store, 0)
    assert [p["start"] for p in after] == list(range(0, target, 64))
    assert all(a["record"] == b["record"] and a["slabs"] == b["slabs"] for a, b in zip(after, before))
    assert [p["rows"] for p in after] == [min(64, target - p["start"]) for p in after]
    assert [p["tiers"] for p in after] == [(4, 2)] * len(after)
    k2, v2 = (torch.cat([x[:, :, :target], y], 2) for x, y in zip((k, v), rows(200, seed=2)))
    for at, end in ((target, target + 1), (target + 1, target + 8), (target + 8, target + 200)):
        store.append(k2[:, :, at:end], v2[:, :, at:end])
        attention_is_right(store, basis, k2[:, :, :end], v2[:, :, :end], min(8, end - at))
    starts = [int(store.arena.table[p, START]) for p in store.sequences[0].pages]
    assert starts == [*range(0, target, 64), *range(target, target + 200, 64)]
    check_slots(store)


@pytest.mark.parametrize("window", [(0, 0, 0), (64, 0, 0), (64, 0, 64), (64, 64, 0)])
@pytest.mark.parametrize("step", [1, 7, 30])
def test_pages_that_start_anywhere_keep_their_open_rows(window: tuple[int, int, int], step: int) -> None:
    """After a long crop pages are not aligned to 64, so an open page may begin before every window."""
    k, v = rows(560)
    store, basis = make_store(2, DIM, tiers=(8, 8), window=WindowConfig(*window))
    fill(store, k[:, :, :450], v[:, :, :450])
    store.settle()
    store.crop([300] * len(store.sequences))
    k, v = (torch.cat([x[:, :, :300], x[:, :, 450:]], 2) for x in (k, v))
    for at in range(300, 410, step):
        end = min(at + step, 410)
        store.append(k[:, :, at:end], v[:, :, at:end])
        store.settle()
        last = store.sequences[0].pages[-1]
        if not store.arena.table[last, TIER]:
            start, n, slot = (int(store.arena.table[last, c]) for c in (START, ROWS, EXACT))
            assert slot >= 0, f"the open page lost its rows at {end} tokens"
            assert torch.equal(store.arena.exact.data[0][slot, 0, :, :n], k[0, :, start : start + n])
        check_slots(store)
    attention_is_right(store, basis, k, v, 5)


def test_a_cut_page_can_be_cut_again() -> None:
    k, v = rows(700)
    store, basis = make_store(2, DIM, window=WindowConfig(64, 64, 0))
    fill(store, k, v)
    store.crop([300] * len(store.sequences))
    store.crop([290] * len(store.sequences))
    fill(store, *rows(70, seed=3))
    store.crop([295] * len(store.sequences))
    store.crop([270] * len(store.sequences))
    assert [(p["start"], p["rows"]) for p in page_contents(store, 0)][-1] == (256, 14)
    tail = rows(150, seed=4)
    fill(store, *tail, chunk=30)
    attention_is_right(store, basis, *tail, 8)
    assert store.sequences[0].length == 420
    check_slots(store)


@pytest.mark.parametrize("target", [0, 63, 64, 65])
@pytest.mark.parametrize("length", [65, 128, 700])
def test_cropping_to_the_first_pages(length: int, target: int) -> None:
    k, v = rows(length, batch=2)
    window = WindowConfig(64, 64, 64)
    store, basis = make_store(2, DIM, tiers=(2, 4), window=window)
    fill(store, k, v, chunk=64)
    store.crop([target] * len(store.sequences))
    assert [s.length for s in store.sequences] == [target] * 2
    k2, v2 = (torch.cat([x[:, :, :target], y], 2) for x, y in zip((k, v), rows(150, batch=2, seed=5)))
    fill(store, k2, v2, start=target)
    fresh, _ = make_store(2, DIM, tiers=(2, 4), window=window)
    fill(fresh, k2, v2)
    if target <= 64 or length == 65 or length == 128:  # page 1 was still exact, or gone altogether
        for b in (0, 1):
            assert page_contents(store, b) == page_contents(fresh, b)
    else:
        assert [p["rows"] for p in page_contents(store, 0)] == [64, 1, 64, 64, 22]
    attention_is_right(store, basis, k2, v2, 8)
    check_slots(store)


@pytest.mark.parametrize("target", [-1, 101])
def test_a_crop_out_of_range_changes_nothing(target: int) -> None:
    store, _ = make_store(2, DIM)
    fill(store, *rows(100))
    before = page_contents(store, 0)
    with pytest.raises(CacheStateError, match=f"cannot crop 100 tokens to {target}"):
        store.crop([target] * len(store.sequences))
    assert page_contents(store, 0) == before
    store.crop([100] * len(store.sequences))
    assert page_contents(store, 0) == before


def test_reset_gives_every_byte_back_and_the_store_is_as_new() -> None:
    budget = Budget()
    store, _ = make_store(2, DIM, tiers=(8, 4), budget=budget)
    fill(store, *rows(500, batch=2))
    assert sum(store.memory().values()) == storage_bytes(store) > 0
    store.reset()
    assert sum(store.memory().values()) == storage_bytes(store) == budget.used == 0
    k, v = rows(300, batch=3, seed=6)
    fill(store, k, v, chunk=100)
    fresh, _ = make_store(2, DIM, tiers=(8, 4))
    fill(fresh, k, v, chunk=100)
    assert [page_contents(store, b) for b in range(3)] == [page_contents(fresh, b) for b in range(3)]


def test_memory_is_counted_to_the_byte() -> None:
    budget = Budget()
    store, _ = make_store(3, 48, tiers=(8, 4), budget=budget, dtype=torch.bfloat16)
    k, v = random_rows(2, 3, 600, 48, dtype=torch.bfloat16)

    def counted() -> dict[str, int]:
        memory = store.memory()
        assert sum(memory.values()) == storage_bytes(store) == budget.used
        return memory

    assert sum(counted().values()) == 0
    fill(store, k[:, :, :50], v[:, :, :50])
    assert counted()["windows"] == 2 * 2 * 3 * 64 * 48 * 2
    fill(store, k, v, chunk=37, start=50)
    memory = counted()
    pages, slabs = store.arena.pages.slots, store.arena.slabs.slots
    assert memory["codes"] == (2 * pages + slabs) * 3 * 64 * 12
    assert memory["scales"] == pages * 2 * (2 + 2) * 3 * 64
    assert memory["centers"] == pages * (store.layout.record_bytes - store.layout.center_offset)
    assert memory["page_tables"] == pages * (11 * 4 + 4 * 4 + 2 * 4) + 2 * 10 * 4
    for page in list(store.sequences[0].pages[:3]):
        store.arena.shed(page, 0)
    counted()
    store.compact()
    assert counted()["codes"] < memory["codes"]
    store.crop([130] * len(store.sequences))
    counted()


def test_compaction_moves_slots_but_not_contents() -> None:
    store, basis = make_store(2, DIM, tiers=(8, 8), window=WindowConfig(64, 64, 0))
    k, v = rows(600, batch=2)
    fill(store, k, v)
    for i, page in enumerate(p for s in store.sequences for p in s.pages[:7]):
        for _ in range(i % 3):
            store.arena.shed(page, i % 2)
    before = [page_contents(store, b) for b in (0, 1)]
    slots = store.arena.slabs.slots
    store.compact()
    check_slots(store)
    assert store.arena.slabs.slots < slots and not store.arena.slabs.free
    assert [page_contents(store, b) for b in (0, 1)] == before
    attention_is_right(store, basis, k, v, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_of_a_batch_never_touch(dtype: torch.dtype) -> None:
    k, v = random_rows(3, 2, 450, DIM, dtype=dtype)
    loud_k, loud_v = k.clone(), v.clone()
    loud_k[1] *= 1000
    loud_v[1] *= 1000
    contents = []
    for kk, vv in ((k, v), (loud_k, loud_v)):
        store, _ = make_store(2, DIM, tiers=(4, 4), dtype=dtype)
        fill(store, kk, vv, chunk=33)
        contents.append([page_contents(store, b) for b in range(3)])
    assert contents[0][0] == contents[1][0] and contents[0][2] == contents[1][2]
    assert contents[0][1] != contents[1][1]
    alone, _ = make_store(2, DIM, tiers=(4, 4), dtype=dtype)
    fill(alone, k[2:], v[2:], chunk=33)
    assert page_contents(alone, 0) == contents[0][2]


def test_rows_that_do_not_fit_are_refused() -> None:
    store, _ = make_store(2, DIM)
    k, v = rows(10, batch=2)
    fill(store, k, v)
    for bad_k, bad_v, message in (
        (k[:1], v[:1], "do not fit a cache of 2 sequences with 2 KV heads of dimension 32"),
        (k, v[:, :, :9], "do not fit"),
        (k[:, :1], v[:, :1], "do not fit"),
        (k[..., :16], v[..., :16], "do not fit"),
        (k[0], v[0], "do not fit"),
        (k.bfloat16(), v.bfloat16(), "rows are torch.bfloat16, the cache holds torch.float32"),
    ):
        with pytest.raises(CacheStateError, match=message):
            store.append(bad_k, bad_v)
    assert [s.length for s in store.sequences] == [10, 10]
    assert store.arena.table[:, TIER].tolist() == [0, 0]
