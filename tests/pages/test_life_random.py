"""Random lives: whatever is appended, cropped, shed, compacted and reset, the store stays consistent."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from helpers import (
    EXACT,
    ROWS,
    START,
    TIER,
    check_slots,
    generator,
    layer_profile,
    make_store,
    oracle_basis,
    relative_error,
    storage_bytes,
    stored,
)  # fmt: skip
from lamina.attention.cpu import attend_cpu
from lamina.attention.types import ReadBasis
from lamina.pages import Budget, LayerStore, StoreView, WindowConfig

HEADS, DIM = 1, 16
PROFILE = layer_profile(HEADS, DIM, seed=8)

steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 200)),
        st.tuples(st.just("append"), st.integers(1, 9)),
        st.tuples(st.just("crop"), st.integers(0, 400)),
        st.tuples(st.just("shed"), st.integers(0, 50)),
        st.tuples(st.sampled_from(["settle", "compact", "reset"]), st.just(0)),
    ),
    min_size=3,
    max_size=14,
)
windows = st.tuples(*[st.sampled_from([0, 64, 128])] * 3)
tiers = st.lists(st.tuples(*[st.sampled_from([2, 4, 8])] * 2), min_size=1, max_size=4)


class Model:
    """What the store should hold: the rows of each sequence, nothing else."""

    def __init__(self, window: WindowConfig, tiers: list[tuple[int, int]], mirrored: bool) -> None:
        self.budget, self.calls = Budget(), 0
        self.g = generator(len(tiers))
        self.basis: ReadBasis
        self.store: LayerStore
        self.store, self.basis = make_store(
            HEADS,
            DIM,
            window=window,
            budget=self.budget,
            profile=PROFILE,
            tiers=lambda: tiers[self.calls % len(tiers)],
            mirrored=mirrored,
        )
        self.rows = torch.empty(2, 2, HEADS, 0, DIM)  # k or v, sequence

    @property
    def length(self) -> int:
        return self.rows.shape[3]

    def append(self, n: int) -> None:
        new = torch.randn(2, 2, HEADS, n, DIM, generator=self.g)
        self.rows = torch.cat([self.rows, new], 3)
        self.calls += 1
        self.store.append(*new)

    def crop(self, n: int) -> None:
        self.rows = self.rows[:, :, :, : max(0, self.length - n)]
        self.store.crop([self.length] * len(self.store.sequences))

    def shed(self, i: int) -> None:
        found = self.store.arena.shed_candidates()
        if found:
            self.store.arena.shed(*found[i % len(found)][2:])

    def settle(self, _: int) -> None:
        self.store.settle()

    def compact(self, _: int) -> None:
        self.store.compact()

    def reset(self, _: int) -> None:
        self.rows = self.rows[:, :, :, :0]
        self.store.reset()
        assert self.budget.used == 0 or self.store.page_ids().numel() == self.budget.used == 0


def view(store: LayerStore) -> StoreView:
    return replace(store.view(), table=store.arena.table, page_ids=store.page_ids())


def check_mirror(store: LayerStore) -> None:
    """What the device is told, in as few words as goes, is what there is."""
    seen, ids = store.view(), store.page_ids()
    used = ids[ids >= 0].long()
    assert torch.equal(seen.table[used], store.arena.device_rows(used) if store.arena.mirrored else seen.table[used])
    assert torch.equal(seen.page_ids[:, : ids.shape[1]], ids) and bool((seen.page_ids[:, ids.shape[1] :] == -1).all())


def check(model: Model) -> None:
    store = model.store
    check_slots(store)
    assert sum(store.memory().values()) == storage_bytes(store) == model.budget.used
    check_mirror(store)
    s = stored(view(store))
    for b, sequence in enumerate(store.sequences):
        assert sequence.length == model.length
        at = 0
        for i, page in enumerate(sequence.pages):
            row = store.arena.table[page].tolist()
            assert row[START] == at and 0 < row[ROWS] <= 64
            assert row[TIER] or (row[EXACT] >= 0 and i == len(sequence.pages) - 1)
            in_reach = row[START] < store.window.sink or row[START] >= store.window.kept_from(sequence.length)
            assert in_reach or row[EXACT] >= 0 or row[TIER]
            rows = model.rows[:, b, :, at : at + row[ROWS]]
            if row[EXACT] >= 0:
                assert torch.equal(store.arena.exact.data[0][row[EXACT]][:, :, : row[ROWS]], rows)
            if row[TIER]:
                check_codes(s, page, row[ROWS], rows)
            at += row[ROWS]
        assert at == sequence.length


def check_codes(s: oracle.Stored, page: int, n: int, rows: torch.Tensor) -> None:
    """Codes are those of these rows, not of others: the error is what the bits that are left allow."""
    t = PROFILE.transform
    packed = rows[0] @ t.k_forward, (rows[1] - t.mean_v[:, None]) @ t.v_forward
    for side, expected in enumerate(packed):
        ours, _ = s.read(page, side)
        error = float(((ours[:, :n] - expected.numpy()) ** 2).sum() / (expected**2).sum())
        assert error < {2: 0.45, 4: 0.04, 8: 5e-4}[s.bits_read(page, side)], (side, error)


@settings(max_examples=40)
@given(steps, windows, tiers, st.booleans())
def test_a_store_holds_what_was_appended_and_not_cropped(
    steps: list[tuple[str, int]], window: tuple[int, int, int], tiers: list[tuple[int, int]], mirrored: bool
) -> None:
    model = Model(WindowConfig(*window), tiers, mirrored)
    for name, n in steps:
        act: Callable[[int], None] = getattr(model, name)
        act(n)
        check(model)
    model.append(3)
    check(model)
    q = torch.randn(2, 2, 3, DIM, generator=model.g)
    expected, lse_packed, lse, _ = oracle.attend(q.numpy(), stored(view(model.store)), oracle_basis(model.basis))
    result = attend_cpu(q, view(model.store), model.basis)
    assert relative_error(result.out.numpy(), expected) < 2e-3
    np.testing.assert_allclose(result.lse.numpy(), lse, atol=2e-3)
    np.testing.assert_allclose(result.lse_packed.numpy(), lse_packed, atol=2e-3)
