"""Pools of slots and the budget they share."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina.errors import ConfigError, LaminaError, MemoryBudgetError
from lamina.pages import Budget, WindowConfig
from lamina.pages.pool import Field, Pool


def make_pool(budget: Budget) -> Pool:
    return Pool(budget, Field((3,), torch.int32, "cpu"), Field((2, 2), torch.float64, "cpu"))


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "shrink"]), st.integers(1, 9)), max_size=30))
def test_content_survives_growth_release_and_shrinking(steps: list[tuple[str, int]]) -> None:
    budget = Budget()
    pool = make_pool(budget)
    assert pool.slot_bytes == 3 * 4 + 4 * 8
    held: dict[int, int] = {}  # slot -> what was written there
    stamp = 0
    for what, n in steps:
        if what == "take":
            assert pool.missing_bytes(n) == max(0, n - len(pool.free)) * pool.slot_bytes
            pool.reserve(n)
            for _ in range(n):
                slot, stamp = pool.allocate(), stamp + 1
                assert slot not in held
                pool.data[0][slot], pool.data[1][slot] = stamp, -stamp
                held[slot] = stamp
        elif what == "give":
            gone = list(held)[:: n + 1]
            pool.release(gone)
            held = {slot: x for slot, x in held.items() if slot not in gone}
        else:
            moved = pool.shrink()
            held = {moved.get(slot, slot): x for slot, x in held.items()}
            assert pool.slots == len(held) and not pool.free
        assert sorted([*held, *pool.free]) == list(range(pool.slots))
        assert budget.used == pool.n_bytes == pool.slots * pool.slot_bytes
        for slot, x in held.items():
            assert bool((pool.data[0][slot] == x).all() and (pool.data[1][slot] == -x).all())


def test_growth_is_generous_only_within_the_budget() -> None:
    pool = make_pool(Budget())
    pool.reserve(320)
    pool.free.clear()
    pool.reserve(1)
    assert pool.slots == 330
    tight = make_pool(Budget(322 * 44))
    tight.reserve(320)
    tight.free.clear()
    tight.reserve(1)
    assert tight.slots == 321


def test_a_budget_asks_for_what_is_short_and_says_what_is_missing() -> None:
    budget = Budget(1000)
    budget.ensure(lambda: 1000)
    asked: list[tuple[int, int]] = []

    def reclaim(short: int, ranks: int) -> None:
        asked.append((short, ranks))
        budget.used -= 30 if len(asked) == 1 else 0

    budget.used, budget.reclaim = 990, reclaim
    budget.ensure(lambda: 40, ranks=1)
    assert asked == [(30, 1)] and budget.used == 960
    with pytest.raises(MemoryBudgetError, match=r"max_bytes=1,000 is too small: 1,200 bytes are needed now.*raise max"):
        budget.ensure(lambda: 240)
    assert issubclass(MemoryBudgetError, LaminaError) and issubclass(MemoryBudgetError, MemoryError)
    Budget().ensure(lambda: 10**18)


@pytest.mark.parametrize("name", ["sink", "recent", "rollback"])
@pytest.mark.parametrize("value", [-64, 1, 63, 100, 64.0, "64"])
def test_windows_are_whole_pages(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*must be a non-negative multiple of 64 tokens"):
        WindowConfig(**{name: value})  # type: ignore[arg-type]


def test_the_window_rule() -> None:
    """Page j is read exactly iff j < S/64 or j >= floor(t/64) - R/64; rows are kept R + rollback back."""
    window = WindowConfig(64, 256, 128)
    for t in (0, 63, 64, 700, 703, 704):
        assert window.exact_from(t) == 64 * (t // 64 - 4)
        assert window.kept_from(t) == 64 * (t // 64 - 6)
    assert WindowConfig() == WindowConfig(64, 256, 64)
