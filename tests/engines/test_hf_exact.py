"""While a request is no longer than S + R, its attention is exactly the engine's; after that it is close."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lamina.engines.hf import LaminaCache, cache_kwarg
from lamina.pages import WindowConfig
from tiny_models import KINDS, build, logits_of, profile_of, tokens

LIMIT = 64 + 256
SHORT = WindowConfig(64, 64, 64)


def stepped(model: PreTrainedModel, cache: LaminaCache, ids: Tensor, cuts: list[int]) -> Tensor:
    """Logits of a sequence that is fed in pieces."""
    spans = list(pairwise([0, *cuts, ids.shape[1]]))
    return torch.cat([logits_of(model, ids[:, a:b], **cache_kwarg(model, cache)) for a, b in spans], 1)


CUTS = {
    "prefill": [],
    "decode": list(range(290, LIMIT)),
    "chunks": [1, 8, 17, 64, 129, 300],
    "drafts": list(range(280, LIMIT, 5)),
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_logits_within_the_windows_are_the_models_own(kind: str, cuts: list[int]) -> None:
    model, ids = build(kind), tokens(2, LIMIT + 64 + 1)
    expected = logits_of(model, ids)
    cache = LaminaCache(model, profile_of(kind), tiers=2)
    ours = stepped(model, cache, ids[:, :LIMIT], cuts)
    torch.testing.assert_close(ours, expected[:, :LIMIT], rtol=1e-5, atol=2e-5)
    # the next page completes, the window moves on, and only then are codes read
    ours = stepped(model, cache, ids[:, LIMIT:], [60, 64])
    torch.testing.assert_close(ours[:, :64], expected[:, LIMIT : LIMIT + 64], rtol=1e-5, atol=2e-5)
    assert float((ours[:, 64] - expected[:, -1]).abs().max()) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype: torch.dtype) -> None:
    model, ids = build("Qwen2").to(dtype), tokens(1, 330)
    expected = logits_of(model, ids)
    cache = LaminaCache(model, profile_of("Qwen2"), tiers=8, window=SHORT)
    ours = stepped(model, cache, ids, [100, *range(310, 330)])
    assert ours.dtype == dtype and cache.layers[0].store.arena.exact.data[0].dtype == dtype
    error = (ours.float() - expected.float()).abs()
    assert float(error[:, :100].max()) < 0.01
    assert float(error.mean()) < 0.03 and float(error.max()) < 0.3


@pytest.mark.parametrize("transform", ["identity", "hadamard", "oscar", "balanced"])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_logits_past_the_windows_are_close(kind: str, transform: str) -> None:
    """Teacher-forced; more bits are better, 8 bits are nearly exact even with a key bias of many sigma."""
    model, ids = build(kind), tokens(1, 420)
    expected = logits_of(model, ids)
    profile, error = profile_of(kind).with_transform(transform), {}
    for bits in (2, 4, 8):
        cache = LaminaCache(model, profile, tiers=bits, window=SHORT)
        ours = stepped(model, cache, ids, [300, *range(410, 420)])
        torch.testing.assert_close(ours[:, :300], expected[:, :300], rtol=1e-5, atol=2e-5)  # one chunk, exact
        error[bits] = float((ours - expected)[:, 300:].square().mean().sqrt() / expected.std())
    assert error[8] < error[4] / 4 < error[2] / 4
    assert error[8] < 0.02 and error[2] < 0.7


def test_sides_and_layers_have_their_own_tiers() -> None:
    model, ids = build("Llama"), tokens(1, 300)
    cache = LaminaCache(model, profile_of("Llama"), tiers=[(2, 8), (4, 2)], window=SHORT)
    stepped(model, cache, ids[:, :130], [])
    cache.tiers = [(8, 8), (2, 4)]
    stepped(model, cache, ids[:, 130:], [])
    tiers = [layer.store.arena.table[layer.store.sequences[0].pages, 2:4].tolist() for layer in cache.layers]
    assert tiers == [[[2, 8]] * 2 + [[8, 8]] * 2 + [[0, 0]], [[4, 2]] * 2 + [[2, 4]] * 2 + [[0, 0]]]
    assert LaminaCache(model, profile_of("Llama")).tiers == ((2, 2),) * 2, "the profile's own"


def test_chunks_of_64_see_what_decode_sees() -> None:
    """SPEC 5: fed in 64-token chunks, prefill sees just what decode would."""
    model, ids = build("Llama"), tokens(1, 64 * 6)
    runs = []
    for cuts in (list(range(64, 384, 64)), list(range(1, 384))):
        cache = LaminaCache(model, profile_of("Llama"), tiers=2, window=SHORT)
        runs.append(stepped(model, cache, ids, cuts))
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-3, atol=1e-3)


def test_float64_rows_are_read_by_the_plain_path() -> None:
    """Compiled kernels know floats of up to 32 bits; others are read in plain torch, not by an error in the middle."""
    model = build("Llama").double()
    cache = LaminaCache(model, profile_of("Llama"), tiers=8, window=WindowConfig(recent=64))
    ids = tokens(1, 310)
    logits_of(model, ids[:, :300], **cache_kwarg(model, cache))
    ours = torch.cat([logits_of(model, ids[:, t : t + 1], **cache_kwarg(model, cache)) for t in range(300, 310)], 1)
    assert ours.dtype == torch.float64
    assert float((ours - logits_of(model, ids)[:, 300:]).abs().max()) < 0.05
