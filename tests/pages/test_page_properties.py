"""Any rows, shapes, dtypes, tiers and chunkings through a real store; and neighbours that must not be felt."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import check_slots, generator, layer_profile, make_store, page_contents, stored
from lamina.codec import CodecConfig, ScaleRule
from lamina.engines.hf import LaminaCache, cache_kwarg
from lamina.pages import WindowConfig
from tiny_models import build, profile_of, tokens

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NO_WINDOW = WindowConfig(0, 0, 0)


def adversarial(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Rows that break naive codecs, exactly representable in ``dtype``."""
    g = generator(seed)
    x = torch.randn(shape, generator=g)
    if kind == "constant":
        x = torch.full(shape, 3.7)
    elif kind == "zero":
        x = torch.zeros(shape)
    elif kind == "spike":
        x.view(-1)[int(torch.randint(x.numel(), (1,), generator=g))] = 6e4 if dtype == torch.float16 else 1e5
    elif kind == "near constant":
        x = 100 + 1e-3 * x
    elif kind == "denormal":
        x = x * (2.0**-20 if dtype == torch.float16 else 2.0**-130)
    elif kind == "offset":
        x = x + 1000 * torch.randn(shape[-1], generator=g)
    return x.to(dtype)


KINDS = ("normal", "constant", "zero", "spike", "near constant", "denormal", "offset")


@given(
    heads=st.integers(1, 3),
    dim=st.sampled_from((16, 48, 64, 80, 128)),
    dtype=st.sampled_from(DTYPES),
    bits=st.tuples(st.sampled_from((2, 4, 8)), st.sampled_from((2, 4, 8))),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    rule=st.sampled_from(list(ScaleRule)),
    tokens_stored=st.integers(1, 200),
    cuts=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_rows_come_back(heads, dim, dtype, bits, kinds, rule, tokens_stored, cuts, seed) -> None:
    """Finite, as near as the grid allows, and the same bytes for every chunking."""
    k, v = (adversarial(kind, (1, heads, tokens_stored, dim), dtype, seed + i) for i, kind in enumerate(kinds))
    contents = []
    for chunks in (cuts, [tokens_stored]):
        store, _ = make_store(
            heads, dim, tiers=bits, window=NO_WINDOW, dtype=dtype, codec=CodecConfig(rule=rule),
            profile=layer_profile(heads, dim, plain=True),
        )  # fmt: skip
        at = 0
        while at < tokens_stored:
            n = min(chunks[at % len(chunks)], tokens_stored - at)
            store.append(k[:, :, at : at + n], v[:, :, at : at + n])
            at += n
        store.settle()
        check_slots(store)
        contents.append(page_contents(store, 0))
    assert contents[0] == contents[1]
    view = stored(store.view())
    for page in view.page_ids[0]:
        start, rows = (int(n) for n in view.table[page, :2])
        if not view.table[page, 2]:
            continue
        for side, x in enumerate((k, v)):
            true = x[0, :, start : start + rows].double().numpy()
            back, step = view.read(page, side)
            assert np.isfinite(back).all()
            error = np.abs(back - true)
            # Off the grid by half a step inside; at its ends by what a row's tail reaches beyond, which only the
            # unbiased and the clipping rule allow; and by the rounding of a 16-bit midpoint.
            reach = np.abs(true - true.mean(-1, keepdims=True)).max(-1) if rule != ScaleRule.MINMAX else 0.0
            # A centre in 8 bits spans 254 steps over the largest channel of its page.
            center = np.abs(true).max(axis=(1, 2), keepdims=False)[:, None] / 127 if side == 0 else 0.0
            limit = 0.51 * step + reach + center + 2.0**-8 * np.abs(true).max(-1) + 1e-37
            assert (error.max(-1) <= limit).all(), (error.max(-1) / limit).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiers", [(2, 2), (4, 2), (8, 8)])
def test_a_neighbour_a_thousand_times_larger_is_not_felt(dtype: torch.dtype, tiers: tuple[int, int]) -> None:
    g = generator(0)
    k, v = torch.randn(2, 1, 2, 500, 64, generator=g).to(dtype)
    loud_k, loud_v = (1000 * torch.randn(2, 1, 2, 500, 64, generator=g)).to(dtype)
    alone, _ = make_store(2, 64, tiers=tiers, dtype=dtype)
    beside, _ = make_store(2, 64, tiers=tiers, dtype=dtype)
    for a, b in ((0, 100), (100, 101), (101, 350), (350, 500)):
        alone.append(k[:, :, a:b], v[:, :, a:b])
        rows = torch.cat([loud_k, k])[:, :, a:b], torch.cat([loud_v, v])[:, :, a:b]
        beside.append(*rows)
    assert page_contents(beside, 1) == page_contents(alone, 0)
    assert page_contents(beside, 0) != page_contents(alone, 0)


def test_nor_by_a_model_that_pads() -> None:
    """The rows of a left-padded batch are those of each prompt alone, byte by byte where the model's own rows are."""
    model = build("Llama").double()
    ids = tokens(2, 400)
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[0, :137] = 0
    together = LaminaCache(model, profile_of("Llama"), tiers=2, window=WindowConfig(recent=64))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, **cache_kwarg(model, together))
        for b, row in enumerate((ids[:1, 137:], ids[1:])):
            alone = LaminaCache(model, profile_of("Llama"), tiers=2, window=WindowConfig(recent=64))
            model(row, **cache_kwarg(model, alone))
            for mine, theirs in zip(together.ours, alone.ours):
                ours, expected = page_contents(mine.store, b), page_contents(theirs.store, 0)
                assert [p["start"] for p in ours] == [p["start"] for p in expected]
                same = [x["record"] == y["record"] for x, y in zip(ours, expected) if "record" in x]
                assert len(same) >= 3 and sum(same) >= len(same) - 1, "at most a code on a border differs"
