"""Sequences that share pages: nobody sees what another writes, and nothing is kept or lost by mistake."""

import pytest
import torch
from torch import Tensor

from helpers import START, check_slots, fill, make_store, page_contents, random_rows, storage_bytes, without_exact
from lamina.errors import CacheStateError, MemoryBudgetError
from lamina.pages import Budget, LayerStore, WindowConfig
from lamina.pages.pager import attach_pager

HEADS, DIM = 2, 32
WINDOW = WindowConfig(64, 128, 64)


def store_of(batch: int, tokens: int, **kwargs: object) -> tuple[LayerStore, Tensor, Tensor]:
    """A filled store and rows for ``tokens + 200`` tokens."""
    store, _ = make_store(HEADS, DIM, **{"tiers": (4, 2), "window": WINDOW, **kwargs})  # type: ignore[arg-type]
    k, v = random_rows(batch, HEADS, tokens + 200, DIM)
    fill(store, k[:, :, :tokens], v[:, :, :tokens], chunk=50)
    return store, k, v


def alone(k: Tensor, v: Tensor, cuts: list[int]) -> list[dict]:
    """Pages of one sequence in a store of its own, appended in the same chunks."""
    store, _ = make_store(HEADS, DIM, tiers=(4, 2), window=WINDOW)
    for a, b in zip([0, *cuts], cuts):
        store.append(k[:, :, a:b], v[:, :, a:b])
    return page_contents(store, 0)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 300, 320])
def test_repeated_sequences_part_when_they_are_written(tokens: int) -> None:
    store, k, v = store_of(1, tokens)
    before = storage_bytes(store)
    store.select([0, 0, 0])
    assert storage_bytes(store) - before <= 3 * 4 * 8, "nothing but page ids"
    check_slots(store)
    parts = [random_rows(1, HEADS, 100, DIM, seed=s) for s in (1, 2, 3)]
    for t in range(0, 100, 7):
        chunk = [torch.cat([p[i][:, :, t : t + 7] for p in parts]) for i in (0, 1)]
        store.append(*chunk)
    check_slots(store)
    cuts = [*range(50, tokens, 50), tokens, *range(tokens + 7, tokens + 100, 7), tokens + 100]
    for b, (pk, pv) in enumerate(parts):
        rows = torch.cat([k[:, :, :tokens], pk], 2), torch.cat([v[:, :, :tokens], pv], 2)
        assert page_contents(store, b) == alone(*rows, cuts), b


def test_the_order_of_a_batch_is_the_order_asked_for() -> None:
    store, k, v = store_of(3, 330)
    old = [page_contents(store, b) for b in range(3)]
    store.select([2, 0, 2, 1])
    assert [page_contents(store, b) for b in range(4)] == [old[2], old[0], old[2], old[1]]
    store.append(k[[2, 0, 2, 1], :, 330:400], v[[2, 0, 2, 1], :, 330:400])
    cuts = [*range(50, 330, 50), 330, 400]
    assert page_contents(store, 3) == alone(k[1:2], v[1:2], cuts)
    store.select([3])
    check_slots(store)
    store.compact()
    one = make_store(HEADS, DIM, tiers=(4, 2), window=WINDOW)[0]
    fill(one, k[1:2, :, :330], v[1:2, :, :330], chunk=50)
    one.append(k[1:2, :, 330:400], v[1:2, :, 330:400])
    one.compact()
    assert storage_bytes(store) == storage_bytes(one), "rows that left took their bytes along"


@pytest.mark.parametrize("crop", [0, 1, 64, 130, 290, 299])
def test_a_snapshot_survives_everything(crop: int) -> None:
    store, k, v = store_of(2, 300)
    taken, then = store.snapshot(), [page_contents(store, b) for b in range(2)]
    fill(store, k, v, chunk=64, start=300)
    store.crop([crop, 0])
    store.append(k[:, :, 400:470], v[:, :, 400:470])
    check_slots(store)
    for _ in range(2):
        store.restore(taken)
        assert [page_contents(store, b) for b in range(2)] == then
        fill(store, k, v, chunk=50, start=300)
        expected = alone(k[1:2], v[1:2], [*range(50, 501, 50)])
        assert without_exact(page_contents(store, 1)) == without_exact(expected)
        held = {int(store.arena.table[p, START]) for p in store.sequences[1].held}
        assert held == {page["start"] for page in expected if "exact" in page} - {0}
        check_slots(store)
    store.reset()
    store.restore(taken)
    assert [page_contents(store, b) for b in range(2)] == then
    store.reset()
    store.forget(taken)
    assert storage_bytes(store) == store.budget.used == 0


def test_a_crop_uses_exact_rows_that_a_snapshot_kept_and_keeps_them() -> None:
    store, k, v = store_of(1, 300)
    taken, then = store.snapshot(), page_contents(store, 0)
    fill(store, k, v, chunk=50, start=300)
    store.crop([300])
    assert page_contents(store, 0) == then, "as exact as the snapshot"
    store.forget(taken)
    assert page_contents(store, 0) == then, "and still so when the snapshot is gone"
    check_slots(store)


def test_cutting_a_shared_packed_page_copies_it() -> None:
    store, _, _ = store_of(1, 500)
    taken, then = store.snapshot(), page_contents(store, 0)
    store.crop([100])
    cut = page_contents(store, 0)[-1]
    assert (cut["start"], cut["rows"], cut["tiers"]) == (64, 36, (4, 2)) and "exact" not in cut
    assert cut["record"] == then[1]["record"] and cut["slabs"] == then[1]["slabs"]
    store.restore(taken)
    assert page_contents(store, 0) == then
    check_slots(store)


def test_padding_leaves_no_trace() -> None:
    """Rows that are not real are neither stored, nor counted, nor looked at: they may hold anything."""
    k, v = random_rows(2, HEADS, 300, DIM)
    store, _ = make_store(HEADS, DIM, tiers=(4, 2), window=WINDOW)
    real = torch.ones(2, 300, dtype=torch.bool)
    real[0, :123] = real[0, 200:207] = real[1, 299] = False
    dirty_k = torch.where(real[:, None, :, None], k, float("nan"))
    dirty_v = torch.where(real[:, None, :, None], v, 1e30)
    for a, b in ((0, 100), (100, 101), (101, 300)):
        store.append(dirty_k[:, :, a:b], dirty_v[:, :, a:b], real[:, a:b])
    assert [s.length for s in store.sequences] == [170, 299]
    assert page_contents(store, 0) == alone(k[:1, :, real[0]], v[:1, :, real[0]], [170])
    check_slots(store)


def test_added_sequences_are_copies() -> None:
    mine, k, v = store_of(1, 100)
    other, _, _ = store_of(2, 330)
    other.select([1, 1])
    then = page_contents(other, 0)
    mine.extend(other)
    assert [page_contents(mine, b) for b in (1, 2)] == [then, then]
    assert mine.sequences[1].pages == mine.sequences[2].pages, "what was shared there is shared here"
    mine.append(k[[0, 0, 0], :, 100:150], v[[0, 0, 0], :, 100:150])
    assert page_contents(other, 0) == then
    assert page_contents(mine, 0) == alone(k[:, :, :150], v[:, :, :150], [50, 100, 150])
    check_slots(mine)
    check_slots(other)


def test_room_for_copies_is_found_before_anything_changes() -> None:
    budget = Budget()
    store, k, v = store_of(1, 100, budget=budget, tiers=(2, 2))
    attach_pager(budget, lambda: [store])
    store.select([0] * 4)
    then = [page_contents(store, b) for b in range(4)]
    budget.max_bytes = budget.used + store.arena.exact.slot_bytes
    chunk = k[[0] * 4, :, 100:101], v[[0] * 4, :, 100:101]
    with pytest.raises(MemoryBudgetError):
        store.append(*chunk)
    now = [page_contents(store, b) for b in range(4)]
    assert [without_exact(x) for x in now] == [without_exact(x) for x in then], "exact rows of the first page may go"
    budget.max_bytes = None
    store.append(*chunk)
    check_slots(store)


def test_crops_of_each_sequence_are_checked_before_any() -> None:
    store, _, _ = store_of(2, 100)
    then = [page_contents(store, b) for b in range(2)]
    for lengths in ([50, 101], [50, -1]):
        with pytest.raises(CacheStateError, match="cannot crop 100 tokens to"):
            store.crop(lengths)
    assert [page_contents(store, b) for b in range(2)] == then


def test_a_crop_that_frees_more_than_it_copies_needs_no_room() -> None:
    """Three sequences share everything; all are cut inside an old page, at the limit."""
    budget = Budget()
    store, k, v = store_of(1, 330, budget=budget, tiers=(2, 2), window=WindowConfig(0, 0, 0))
    attach_pager(budget, lambda: [store])
    store.select([0] * 3)
    store.compact()
    expected = [page_contents(store, b)[:1] for b in range(3)]
    budget.max_bytes = budget.used
    store.crop([100] * 3)
    assert [s.length for s in store.sequences] == [100] * 3 and budget.used <= budget.max_bytes
    assert [page_contents(store, b)[:1] for b in range(3)] == expected
    check_slots(store)
    tail = [k[[0] * 3, :, 100:130], v[[0] * 3, :, 100:130]]
    budget.max_bytes = None
    store.append(*tail)
    check_slots(store)
