"""For given rows the stored pages never depend on how the rows were cut into chunks (SPEC 5)."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import check_slots, fill, layer_profile, make_store, page_contents, random_rows
from lamina.codec import CodecConfig
from lamina.pages import LayerStore, WindowConfig

TOKENS = 700
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def run(dtype: torch.dtype, tiers: tuple[int, int], chunks: list[int], codec: CodecConfig | None = None) -> LayerStore:
    """Store of two sequences cut at ``chunks``, and one more token that settles the windows."""
    store, _ = make_store(2, 64, tiers=tiers, dtype=dtype, window=WindowConfig(64, 128, 64), codec=codec)
    k, v = random_rows(2, 2, TOKENS + 1, 64, seed=5, dtype=dtype)
    for start, end in pairwise([0, *chunks, TOKENS, TOKENS + 1]):
        if end > start:
            store.append(k[:, :, start:end], v[:, :, start:end])
    check_slots(store)
    return store


@pytest.fixture(scope="module")
def by_pages() -> dict[tuple[torch.dtype, tuple[int, int]], list]:
    """Contents of stores filled in chunks of 64, the order in which pages close."""
    found = {}
    for dtype, tiers in zip(DTYPES, [(2, 2), (4, 8), (8, 4)]):
        store = run(dtype, tiers, list(range(64, TOKENS, 64)))
        found[dtype, tiers] = [page_contents(store, b) for b in (0, 1)]
    return found


@pytest.mark.parametrize("size", [1, 7, 129, 300, TOKENS])
def test_pages_do_not_depend_on_the_chunk_size(size: int, by_pages: dict) -> None:
    for (dtype, tiers), expected in by_pages.items():
        store = run(dtype, tiers, list(range(size, TOKENS, size)))
        for b in (0, 1):
            pages = page_contents(store, b)
            assert len(pages) == 11
            assert pages == expected[b]
            exact = [page["start"] // 64 for page in pages if "exact" in page]
            assert exact == [0, *range(7, 11)], "sink, and pages at most R + rollback old"
            assert all(page["tiers"] == (tiers if page["rows"] == 64 else (0, 0)) for page in pages)


@settings(max_examples=20)
@given(st.lists(st.integers(1, TOKENS - 1), max_size=9, unique=True).map(sorted), st.integers(0, 2))
def test_pages_do_not_depend_on_ragged_chunks(by_pages: dict, chunks: list[int], which: int) -> None:
    dtype, tiers = list(by_pages)[which]
    store = run(dtype, tiers, chunks)
    assert [page_contents(store, b) for b in (0, 1)] == by_pages[dtype, tiers]


@pytest.mark.parametrize("rule", ["minmax", "clip"])
def test_other_codecs(rule: str) -> None:
    codec = CodecConfig(rule=rule, center=False)  # type: ignore[arg-type]
    whole, cut = (run(torch.float32, (2, 2), chunks, codec) for chunks in ([], [5, 260, 263]))
    assert page_contents(whole, 1) == page_contents(cut, 1)


def test_rows_of_any_stride_give_the_same_bytes() -> None:
    """Engines hand over transposed views of [B, T, H, D]."""
    k, v = random_rows(1, 3, 130, 32)
    stores = [make_store(3, 32, tiers=(4, 2), profile=layer_profile(3, 32))[0] for _ in range(2)]
    fill(stores[0], k, v)
    fill(stores[1], *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)))
    assert page_contents(stores[0], 0) == page_contents(stores[1], 0)
