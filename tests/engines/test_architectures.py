"""What Lamina does with many architectures, next to transformers' own attention ("eager") and cache."""

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from architectures import ARCHITECTURES, Architecture, Verdict
from lamina.attention.types import ReadBasis
from lamina.basis.calibrate import calibrate
from lamina.basis.profile import Profile
from lamina.engines import hf_layer
from lamina.engines.hf import ATTENTION, LaminaCache, LaminaLayer, cache_kwarg
from lamina.errors import LaminaError
from lamina.pages import WindowConfig
from tiny_models import PAD, logits_of, tokens

BY_NAME = {a.name: a for a in ARCHITECTURES}
KEPT = [a for a in ARCHITECTURES if a.verdict != Verdict.REFUSED]
REFUSED = [a for a in ARCHITECTURES if a.verdict == Verdict.REFUSED]
SHORT = WindowConfig(64, 0, 64)
CLOSE = 0.02
"""Error of 8-bit logits: 0.0002 to 0.015; `WRONG` shows what mistakes cost."""


def named(architectures: list[Architecture]) -> pytest.MarkDecorator:
    """One test an architecture."""
    return pytest.mark.parametrize("architecture", [pytest.param(a, id=a.name) for a in architectures])


@pytest.fixture(autouse=True)
def quiet_transformers() -> None:
    transformers.logging.set_verbosity_error()


@cache
def calibrated(name: str) -> tuple[PreTrainedModel, Profile]:
    model = BY_NAME[name].build()
    return model, calibrate(model, [tokens(2, 256, seed=100)])


def prepared(architecture: Architecture) -> tuple[PreTrainedModel, Profile]:
    if architecture.missing:
        pytest.skip(architecture.missing)
    return calibrated(architecture.name)


def fed(model: PreTrainedModel, kv: Any, ids: Tensor, cuts: list[int], mask: Tensor | None = None) -> Tensor:
    """Logits of sequences that are fed in pieces."""
    model.set_attn_implementation(ATTENTION if isinstance(kv, LaminaCache) else "eager")
    caches, steps = cache_kwarg(model, kv), []
    for a, b in pairwise([0, *cuts, ids.shape[1]]):
        options = {}
        # Some models count positions from 0 in every call unless they are told.
        if "position_ids" in inspect.signature(model.forward).parameters:
            positions = torch.arange(b).expand(ids.shape[0], -1) if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
            options["position_ids"] = positions[:, a:b]
        if mask is not None:
            options["attention_mask"] = mask[:, :b]
        steps.append(logits_of(model, ids[:, a:b], **options, **caches))
    return torch.cat(steps, 1)


def own_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)


def error_of(ours: Tensor, expected: Tensor) -> float:
    """RMS error over the logits' spread at the median position: a few tokens may be sent to other experts."""
    return float(((ours - expected).square().mean(-1).sqrt() / expected.std()).median())


def storages(x: Any) -> dict[int, int]:
    """Bytes of every storage below an object, by address."""
    if isinstance(x, Tensor):
        return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}
    items = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else []
    return {address: n for item in items for address, n in storages(item).items()}


@named(KEPT)
def test_logits_within_the_windows_are_the_models_own(architecture: Architecture) -> None:
    model, profile = prepared(architecture)
    ids, cuts = tokens(1, 150), [100, 130, *range(131, 150)]
    expected = fed(model, own_cache(model), ids, cuts)
    assert float(expected.std()) > 0.5, "flat logits would tell nothing"
    ours = fed(model, LaminaCache(model, profile, tiers=2), ids, cuts)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def past_the_windows(architecture: Architecture) -> tuple[float, LaminaCache]:
    """Error of 400 tokens of which only the first page and the one being filled are exact, and the cache."""
    model, profile = prepared(architecture)
    ids, cuts = tokens(1, 400), [200, 270, *range(271, 300)]
    kv = LaminaCache(model, profile, tiers=8, window=SHORT)
    ours, expected = fed(model, kv, ids, cuts), fed(model, own_cache(model), ids, cuts)
    return error_of(ours[:, 200:], expected[:, 200:]), kv


@named(KEPT)
def test_logits_past_the_windows_are_close(architecture: Architecture) -> None:
    error, kv = past_the_windows(architecture)
    assert error < CLOSE
    packed, memory = kv.geometry.packed, kv.memory()
    assert tuple(packed) == architecture.packed and memory["codes"] > 0
    overhead = 40 / min(g.head_dim for g in packed.values())
    assert 8 < kv.bits()["history"] < 8 + overhead + 0.1
    theirs = DynamicCache(config=kv.config).layers
    for i, layer in enumerate(kv.layers):
        assert type(layer) is (LaminaLayer if i in packed else type(theirs[i]))
    held = storages([vars(layer) for i, layer in enumerate(kv.layers) if i not in packed])
    assert memory.get("host_layers", 0) == sum(held.values())
    assert bool(held) == (architecture.verdict == Verdict.PARTLY)


def for_the_sharing_layer(change: Callable[[ReadBasis], ReadBasis]) -> Callable[[ReadBasis], ReadBasis]:
    """Change every third call's basis: of three full-attention layers the last one reads the second one's rows."""
    calls = iter(range(10**6))
    return lambda basis: change(basis) if next(calls) % 3 == 2 else basis


def other_head(basis: ReadBasis) -> ReadBasis:
    return replace(basis, q_forward=basis.q_forward.roll(1, 0), v_back=basis.v_back.roll(1, 0))


WRONG: list[tuple[str, str, Callable[[ReadBasis], ReadBasis]]] = [
    ("Gemma2 full", "no cap", lambda b: replace(b, softcap=0.0)),
    ("Gemma2", "no cap", lambda b: replace(b, softcap=0.0)),
    ("GptOss", "no sinks", lambda b: replace(b, sinks=None)),
    ("Granite", "default scaling", lambda b: replace(b, scaling=b.q_forward.shape[-1] ** -0.5)),
    ("Gemma3", "default scaling", lambda b: replace(b, scaling=b.q_forward.shape[-1] ** -0.5)),
    ("Gemma3n", "another basis where rows are shared", for_the_sharing_layer(other_head)),
    ("Gemma4", "another basis where rows are shared", for_the_sharing_layer(other_head)),
]


@pytest.mark.parametrize(("name", "change"), [(w[0], w[2]) for w in WRONG], ids=[f"{w[0]}: {w[1]}" for w in WRONG])
def test_mistakes_cost_far_more_than_eight_bits(name: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bound above is worth."""
    right = hf_layer.attend
    monkeypatch.setattr(hf_layer, "attend", lambda q, view, basis, chunk: right(q, view, change(basis), chunk))
    error, _ = past_the_windows(BY_NAME[name])
    assert error > 10 * CLOSE


@named(KEPT)
def test_a_padded_batch_equals_its_sequences_alone(architecture: Architecture) -> None:
    model, profile = prepared(architecture)
    ids, short = tokens(2, 208), 155
    mask = torch.ones_like(ids)
    mask[1, :-short] = 0
    ids = ids.masked_fill(mask == 0, PAD)
    cuts = list(range(203, 208))
    if not architecture.padding:
        expected = fed(model, own_cache(model), ids, cuts, mask)
        ours = fed(model, LaminaCache(model, profile), ids, cuts, mask)
        torch.testing.assert_close(ours[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-4)
        return
    together = fed(model, LaminaCache(model, profile, tiers=8, window=SHORT), ids, cuts, mask)
    for row, n in enumerate((208, short)):
        kv = LaminaCache(model, profile, tiers=8, window=SHORT)
        alone = fed(model, kv, ids[row : row + 1, -n:], [cut - 208 + n for cut in cuts], mask[row : row + 1, -n:])
        # Products of another shape round differently, which can move a code to its neighbour.
        torch.testing.assert_close(together[row, -n:], alone[0], rtol=0, atol=0.02)
        assert kv.memory()["codes"] > 0


@named(KEPT)
def test_greedy_generation_draws_the_models_own_tokens(architecture: Architecture) -> None:
    model, profile = prepared(architecture)
    ids, drawn = tokens(1, 40, seed=3), []
    for kv in (own_cache(model), LaminaCache(model, profile, tiers=2)):
        model.set_attn_implementation(ATTENTION if isinstance(kv, LaminaCache) else "eager")
        drawn.append(model.generate(ids, max_new_tokens=20, do_sample=False, **cache_kwarg(model, kv)))
    assert drawn[0].shape == (1, 60) and torch.equal(drawn[0], drawn[1])


@named(REFUSED)
def test_models_that_cannot_be_served_say_why(architecture: Architecture) -> None:
    """When they are calibrated if that shows it, else at the first call; never later."""
    if architecture.missing:
        pytest.skip(architecture.missing)
    model = architecture.build()
    before = model.config._attn_implementation
    try:
        profile = calibrate(model, [tokens(1, 200)])
    except LaminaError as error:
        assert re.search(architecture.reason, str(error))
    else:
        with pytest.raises(LaminaError, match=architecture.reason):
            logits_of(model, tokens(1, 10), **cache_kwarg(model, LaminaCache(model, profile)))
        model.set_attn_implementation(before)
    assert model.config._attn_implementation == before
