"""NaN or Inf in a row: an error that says where, and nothing is stored."""

import pytest
import torch

from helpers import fill, make_store, page_contents, random_rows
from lamina.errors import LaminaError, NonFiniteError

BAD = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("stored", [0, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_row_is_named_and_nothing_is_stored(side: str, value: float, stored: int, dtype: torch.dtype) -> None:
    store, _ = make_store(2, 32, tiers=(4, 4), dtype=dtype, name="layer 7")
    k, v = random_rows(3, 2, 200, 32, dtype=dtype)
    if stored:
        fill(store, k[:, :, :stored], v[:, :, :stored])
    before = [page_contents(store, b) for b in range(3)] if stored else []
    memory = store.memory()
    rows = [x[:, :, stored:].clone() for x in (k, v)]
    rows[side == "value"][1, 1, 20, 5] = value
    message = f"layer 7: the {side} row of sequence 1, KV head 1, position {stored + 20} holds NaN or Inf"
    with pytest.raises(NonFiniteError, match=message):
        store.append(*rows)
    if stored:
        assert store.memory() == memory
        assert [page_contents(store, b) for b in range(3)] == before
    fill(store, k, v, start=stored)
    fresh, _ = make_store(2, 32, tiers=(4, 4), dtype=dtype)
    fill(fresh, k, v)
    assert [page_contents(store, b) for b in range(3)] == [page_contents(fresh, b) for b in range(3)]


def test_infinities_that_cancel_are_found() -> None:
    """A check by sums alone must not be fooled by +Inf beside -Inf, nor by sums that overflow."""
    store, _ = make_store(1, 16)
    k, v = random_rows(1, 1, 4, 16)
    k[0, 0, 2, 3], v[0, 0, 1, 1] = float("inf"), float("-inf")
    with pytest.raises(NonFiniteError, match="key row of sequence 0, KV head 0, position 2"):
        store.append(k, v)
    assert issubclass(NonFiniteError, LaminaError) and issubclass(NonFiniteError, ValueError)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_finite_rows_are_stored(dtype: torch.dtype) -> None:
    store, _ = make_store(1, 16, dtype=dtype)
    k, v = random_rows(1, 1, 130, 16, dtype=dtype)
    k[0, 0, :, 3] = 6e4
    v[0, 0, 70, 1] = -6e4
    fill(store, k, v)
    assert store.sequences[0].length == 130
