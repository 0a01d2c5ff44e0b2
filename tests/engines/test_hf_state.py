"""Cache state: resets, crops, several caches, budgets, and every misuse that has an error."""

import gc
import re
import weakref
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from helpers import page_contents, storage_bytes
from lamina.engines.hf import ATTENTION, LaminaCache, cache_kwarg
from lamina.errors import CacheStateError, ConfigError, MemoryBudgetError, NonFiniteError, UnsupportedModelError
from lamina.pages import WindowConfig
from tiny_models import PAD, build, logits_of, profile_of, tokens

SHORT = WindowConfig(64, 64, 64)


def fresh(model: PreTrainedModel, kind: str = "Llama", **options: Any) -> LaminaCache:
    return LaminaCache(model, profile_of(kind), **{"tiers": (4, 2), "window": SHORT} | options)


def feed(model: PreTrainedModel, cache: LaminaCache, ids: torch.Tensor, chunk: int = 100) -> torch.Tensor:
    steps = [logits_of(model, x, **cache_kwarg(model, cache)) for x in ids.split(chunk, 1)]
    return torch.cat(steps, 1)


def contents(cache: LaminaCache, sequence: int = 0) -> list:
    return [page_contents(layer.store, sequence) for layer in cache.layers]


def lengths(cache: LaminaCache) -> set[int]:
    return {layer.get_seq_length() for layer in cache.layers}


def test_two_live_caches_on_one_model_do_not_meet() -> None:
    model, a_ids, b_ids = build("Llama"), tokens(1, 300, 1), tokens(2, 300, 2)
    expected_a, expected_b = (
        feed(model, a := fresh(model), a_ids, 50),
        feed(model, b := fresh(model, tiers=8), b_ids, 50),
    )
    mixed_a, mixed_b = fresh(model), fresh(model, tiers=8)
    ours_a, ours_b = [], []
    for x, y in zip(a_ids.split(50, 1), b_ids.split(50, 1), strict=True):
        ours_a.append(logits_of(model, x, **cache_kwarg(model, mixed_a)))
        logits_of(model, x, **cache_kwarg(model, DynamicCache()))
        ours_b.append(logits_of(model, y, **cache_kwarg(model, mixed_b)))
    assert torch.equal(torch.cat(ours_a, 1), expected_a) and torch.equal(torch.cat(ours_b, 1), expected_b)
    assert contents(mixed_a) == contents(a) and contents(mixed_b, 1) == contents(b, 1)


@pytest.mark.parametrize("options", [{}, {"padding": True}], ids=["plain", "padded"])
def test_without_the_cache_the_attention_is_sdpa(options: dict) -> None:
    model, ids = build("Qwen2"), tokens(2, 60)
    mask = torch.ones_like(ids)
    if options:
        ids[0, :20], mask[0, :20] = PAD, 0
    plain = logits_of(model, ids, attention_mask=mask)
    assert model.config._attn_implementation == "sdpa"
    fresh(model, "Qwen2")
    assert model.config._attn_implementation == ATTENTION
    assert torch.equal(logits_of(model, ids, attention_mask=mask), plain)
    dynamic = DynamicCache()
    steps = [logits_of(model, x, **cache_kwarg(model, dynamic)) for x in ids.split(25, 1)] if not options else [plain]
    torch.testing.assert_close(torch.cat(steps, 1), plain, rtol=1e-5, atol=2e-5)


def test_reset_makes_the_cache_as_new() -> None:
    model, ids = build("Llama"), tokens(1, 300)
    cache = fresh(model)
    expected = feed(model, cache, ids)
    assert cache.get_seq_length() == 300
    cache.reset()
    assert cache.get_seq_length() == 0 and sum(cache.memory().values()) == cache.budget.used == 0
    assert torch.equal(feed(model, cache, ids), expected)
    cache.reset()
    assert feed(model, cache, tokens(3, 70)).shape[0] == 3


@pytest.mark.parametrize("by", [-1, -64, -200])
def test_crop_by_a_negative_number_removes_tokens(by: int) -> None:
    model, ids = build("Llama"), tokens(1, 300)
    cache = fresh(model)
    feed(model, cache, ids)
    cache.crop(by)
    assert lengths(cache) == {300 + by}
    ours = feed(model, cache, ids[:, 300 + by :], 30)
    direct = feed(model, fresh(model), ids)[:, 300 + by :]
    assert ours.shape == direct.shape and bool(torch.isfinite(ours).all())


def test_crop_of_nothing_is_nothing() -> None:
    """Transformers crops by minus the number of rejected drafts, which may be none: ``crop(-0)``."""
    model, ids = build("Llama"), tokens(1, 200)
    cache, dynamic = fresh(model), DynamicCache()
    for c in (cache, dynamic):
        logits_of(model, ids, **cache_kwarg(model, c))
        c.crop(-0)
        assert c.get_seq_length() == 200
    assert lengths(cache) == {200}


@pytest.mark.parametrize("to", [-201, 201])
def test_crop_out_of_range(to: int) -> None:
    model = build("Llama")
    cache = fresh(model)
    feed(model, cache, tokens(1, 200))
    before = contents(cache)
    with pytest.raises(CacheStateError, match="cannot crop a cache of 200 tokens"):
        cache.crop(to)
    assert contents(cache) == before


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_memory_and_bits_are_counted(kind: str) -> None:
    model = build(kind)
    cache = fresh(model, kind, tiers=(4, 2))
    assert sum(cache.memory().values()) == 0 and cache.bits()["history"] != cache.bits()["history"]  # NaN
    feed(model, cache, tokens(2, 500), 64)
    total = sum(storage_bytes(layer.store) for layer in cache.layers)
    assert sum(cache.memory().values()) == total == cache.budget.used
    layout = cache.layers[0].store.layout
    page = (layout.record_bytes + layout.slab_bytes) * 8 / (2 * layout.n_heads * layout.head_dim * 64)
    bits = cache.bits()
    assert bits["history"] == pytest.approx(page)
    elements = 2 * 2 * 2 * layout.n_heads * layout.head_dim * 500
    assert bits["context"] == pytest.approx(8 * total / elements) and bits["context"] > bits["history"]


def test_a_dropped_cache_is_freed() -> None:
    model = build("Llama")
    gc.collect()
    gc.disable()
    try:
        cache = fresh(model)
        feed(model, cache, tokens(1, 200))
        store = weakref.ref(cache.layers[0].store)
        del cache
        assert store() is None
    finally:
        gc.enable()


def test_max_bytes_holds_through_a_run() -> None:
    model, ids = build("Llama"), tokens(1, 900)
    whole = fresh(model, tiers=8)
    feed(model, whole, ids, 50)
    limit = int(sum(whole.memory().values()) * 0.8)
    cache = fresh(model, tiers=8, max_bytes=limit)
    for x in ids.split(50, 1):
        logits_of(model, x, **cache_kwarg(model, cache))
        assert sum(cache.memory().values()) <= limit
    assert cache.pager.planes_shed > 0 and lengths(cache) == {900}


@pytest.mark.parametrize("chunk", [1, 40])
def test_a_budget_error_leaves_all_layers_alike(chunk: int) -> None:
    """Whichever layer runs out: after a crop the cache goes on, or it refuses; layers are never out of step."""
    model, ids = build("Llama"), tokens(1, 700)
    for limit in range(82_000, 118_000, 5_000):
        cache = fresh(model, tiers=2, max_bytes=limit)
        with pytest.raises(MemoryBudgetError, match="is too small"):
            for x in ids.split(chunk, 1):
                logits_of(model, x, **cache_kwarg(model, cache))
        goes_on_or_refuses(model, cache, 10)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("crop", [True, False])
def test_a_row_that_is_not_finite_leaves_all_layers_alike(layer: int, crop: bool) -> None:
    model, ids = build("Llama"), tokens(1, 100)
    cache = fresh(model)
    feed(model, cache, ids)
    weight = model.model.layers[layer].self_attn.k_proj.weight
    healthy = weight.data[40, 3].item()
    weight.data[40, 3] = float("nan")
    message = f"layer {layer}: the key row of sequence 0, KV head 1, position 100 holds NaN or Inf"
    with pytest.raises(NonFiniteError, match=message):
        logits_of(model, tokens(1, 1), **cache_kwarg(model, cache))
    weight.data[40, 3] = healthy
    goes_on_or_refuses(model, cache, 70 if crop else None)


def goes_on_or_refuses(model: PreTrainedModel, cache: LaminaCache, crop: int | None) -> None:
    """After an error, either the cache says that it is out of step, or it holds what a run without the error would."""
    length = crop or 100
    try:
        if crop:
            cache.crop(crop)
        logits_of(model, tokens(1, 1), **cache_kwarg(model, cache))
    except CacheStateError:
        return
    assert lengths(cache) == {length + 1}


@pytest.mark.parametrize("stored", [0, 100, 300])
def test_what_the_error_advises_after_a_failed_call_works(stored: int) -> None:
    """Layer 0 has taken the rows, layer 1 has not: the cache says how to go back, and then is as if untouched."""
    model, ids = build("Llama"), tokens(1, 340)
    cache, clean = fresh(model), fresh(model)
    for c in (cache, clean):
        if stored:
            feed(model, c, ids[:, :stored])
    weight = model.model.layers[1].self_attn.v_proj.weight
    healthy = weight.data[3, 3].item()
    weight.data[3, 3] = float("inf")
    with pytest.raises(NonFiniteError, match="layer 1: the value row"):
        logits_of(model, tokens(1, 30, seed=5), **cache_kwarg(model, cache))
    weight.data[3, 3] = healthy
    with pytest.raises(CacheStateError, match=r"call cache.(crop\(\d+\)|reset\(\)) to go back") as e:
        feed(model, cache, ids[:, stored:])
    advice = re.search(r"cache\.(crop\((\d+)\)|reset\(\))", str(e.value))
    assert advice is not None
    if advice[2]:
        assert int(advice[2]) == stored
        cache.crop(stored)
    else:
        cache.reset()
    assert torch.equal(feed(model, cache, ids[:, stored:]), feed(model, clean, ids[:, stored:]))
    assert contents(cache) == contents(clean)


def test_masks_that_are_not_causal_with_padding_are_refused() -> None:
    model, ids = build("Llama"), tokens(2, 40)
    cache = fresh(model)
    logits_of(model, ids, attention_mask=torch.ones_like(ids), **cache_kwarg(model, cache))
    before = contents(cache)
    hidden = torch.ones(2, 41, dtype=torch.long)
    hidden[1, 3] = 0
    with pytest.raises(CacheStateError, match="hides tokens that the cache holds"):
        logits_of(model, ids[:, :1], attention_mask=hidden, **cache_kwarg(model, cache))
    looks_ahead = torch.ones(2, 1, 4, 44, dtype=torch.bool)
    with pytest.raises(CacheStateError, match="not causal"):
        logits_of(model, ids[:, :4], attention_mask=looks_ahead, **cache_kwarg(model, cache))
    per_head = torch.ones(2, 4, 4, 44, dtype=torch.bool).tril(40)
    with pytest.raises(CacheStateError, match="the attention mask has shape"):
        logits_of(model, ids[:, :4], attention_mask=per_head, **cache_kwarg(model, cache))
    assert contents(cache) == before and lengths(cache) == {40}
    additive = torch.zeros(2, 1, 4, 44).masked_fill(~torch.ones(4, 44, dtype=torch.bool).tril(40), -1e30)
    logits_of(model, ids[:, :4], attention_mask=additive, **cache_kwarg(model, cache))
    assert lengths(cache) == {44}


def test_a_padded_cache_asks_for_its_mask() -> None:
    model, ids = build("Llama"), tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    cache = fresh(model)
    logits_of(model, ids, attention_mask=mask, **cache_kwarg(model, cache))
    assert cache.lengths == [35, 40]
    with pytest.raises(CacheStateError, match="padded rows, but this call has no attention_mask"):
        logits_of(model, ids[:, :1], **cache_kwarg(model, cache))


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("other", ["sdpa", "eager"])
def test_another_attention_implementation_is_refused(other: str, when: str) -> None:
    model, ids = build("Llama"), tokens(1, 40)
    cache = fresh(model)
    if when == "between":
        feed(model, cache, ids)
    model.set_attn_implementation(other)
    with pytest.raises(CacheStateError, match=rf"attention '{other}'.*call model.set_attn_implementation\('lamina'\)"):
        logits_of(model, ids, **cache_kwarg(model, cache))
    assert lengths(cache) == {40 if when == "between" else 0}
    model.set_attn_implementation(ATTENTION)
    logits_of(model, ids, **cache_kwarg(model, cache))


def test_rows_that_attention_never_read_are_noticed() -> None:
    """A model that does not pass the key tensor on would attend to its chunk alone."""
    model, ids = build("Llama"), tokens(1, 40)
    cache = fresh(model)
    k = torch.randn(1, 2, 40, 32)
    cache.update(k, k, 0)
    with pytest.raises(CacheStateError, match="does not read this cache"):
        cache.update(k, k, 0)
    cache.reset()
    logits_of(model, ids, **cache_kwarg(model, cache))


def test_what_a_cache_cannot_do_it_refuses() -> None:
    model = build("Llama")
    cache = fresh(model)
    feed(model, cache, tokens(2, 40))
    before = contents(cache)
    for rows in ([], [2], [-1], [0, 5]):
        with pytest.raises(CacheStateError, match="cannot select sequences"):
            cache.select(rows)
    with pytest.raises(CacheStateError, match="cannot select"):
        cache.batch_repeat_interleave(0)
    for other in (cache, fresh(model), "x"):
        with pytest.raises(CacheStateError, match="only the sequences of another LaminaCache"):
            cache.add(other)
    taken = cache.snapshot()
    taken.release()
    with pytest.raises(CacheStateError, match="released"):
        cache.restore(taken)
    with pytest.raises(CacheStateError, match="another cache"):
        cache.restore(fresh(model).snapshot())
    with pytest.raises(CacheStateError, match="do not fit a cache of 2 sequences"):
        logits_of(model, tokens(3, 1), **cache_kwarg(model, cache))
    assert contents(cache) == before and cache.is_compileable is False


def test_dropout_is_refused() -> None:
    model = build("Llama", attention_dropout=0.1).train()
    with pytest.raises(CacheStateError, match=r"attention dropout 0.1; call model.eval\(\)"):
        model(tokens(1, 10), **cache_kwarg(model, fresh(model)))


@pytest.mark.parametrize("name", ["sliding_window", "position_bias"])
def test_attention_extras_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama")
    cache = fresh(model)
    layer = model.model.layers[1].self_attn
    inner = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *a, **k: inner(*a, **k, **{name: torch.ones(1)}))
    with pytest.raises(UnsupportedModelError, match=f"layer 1: attention with '{name}'"):
        logits_of(model, tokens(1, 10), **cache_kwarg(model, cache))


def test_a_logit_scale_that_differs_from_the_profiles_is_refused() -> None:
    model = build("Llama")
    cache = fresh(model)
    logits_of(model, tokens(1, 10), **cache_kwarg(model, cache))
    model.model.layers[0].self_attn.scaling *= 2
    with pytest.raises(UnsupportedModelError, match="layer 0: logits are scaled by"):
        logits_of(model, tokens(1, 1), **cache_kwarg(model, cache))


WRONG_TIERS = [
    (3, "the K tier of layer 0 is 3; a tier is one of 2, 4, 8 bits"),
    ((2, 16), "the V tier of layer 0 is 16"),
    ([(2, 2), (2, 5)], "the V tier of layer 1 is 5"),
    ([(2, 2)], "or 2 pairs, one a layer"),
    ([(2, 2, 2), (2, 2)], "or 2 pairs"),
    ((2, 2, 2), "must be one number, a pair"),
]


@pytest.mark.parametrize(("tiers", "message"), WRONG_TIERS)
def test_wrong_tiers(tiers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fresh(build("Llama"), tiers=tiers)


@pytest.mark.parametrize("max_bytes", [0, -1, 1.5, "1G"])
def test_wrong_budgets(max_bytes: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_bytes=.*must be a positive number of bytes"):
        fresh(build("Llama"), max_bytes=max_bytes)


def test_tiers_set_to_nonsense_later_are_refused_and_store_nothing() -> None:
    model = build("Llama")
    cache = fresh(model)
    feed(model, cache, tokens(1, 60))
    for nonsense in ([(3, 3)] * 2, [(2, 2)], 2.0, [2, 4], "24", (2, 4, 8), True):
        with pytest.raises(ConfigError):
            cache.tiers = nonsense
    assert cache.tiers == ((4, 2),) * 2
    logits_of(model, tokens(1, 10), **cache_kwarg(model, cache))
    cache.tiers = 8
    assert lengths(cache) == {70} and cache.tiers == ((8, 8),) * 2


def test_what_cannot_be_done_is_refused() -> None:
    model = build("Llama")
    cache = fresh(model)
    feed(model, cache, tokens(1, 60))
    for nonsense in (1.5, "3", None, True):
        with pytest.raises(CacheStateError, match="whole number"):
            cache.crop(nonsense)
    with pytest.raises(ConfigError, match=r"Profile\.load"):
        LaminaCache(model, "x.profile")
    assert lengths(cache) == {60}


def test_rows_with_gradients_are_stored_without_them() -> None:
    model = build("Llama")
    cache = fresh(model)
    with torch.enable_grad():
        model(input_ids=tokens(1, 70), **cache_kwarg(model, cache))
        model(input_ids=tokens(1, 1), **cache_kwarg(model, cache))
    assert lengths(cache) == {71}
    assert not cache.layers[0].store.arena.exact.data[0].requires_grad


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_the_first_prompt_under_a_limit(share: float) -> None:
    """All layers give up the same, the bytes stay below the limit, or the error says what the whole prompt needs."""
    model, ids = build("Llama"), tokens(2, 700)
    free, least = fresh(model, tiers=8), fresh(model, tiers=2, window=WindowConfig(0, 0, 0))
    for cache in (free, least):
        feed(model, cache, ids, 700)
    most, fewest = (sum(c.memory().values()) for c in (free, least))
    limit = int(fewest + share * (most - fewest))
    cache = fresh(model, tiers=8, max_bytes=limit)
    feed(model, cache, ids, 700)
    assert sum(cache.memory().values()) == cache.budget.used <= limit
    kept = [[row[10] >= 0 for row in s.arena.table[s.sequences[0].pages].tolist()] for s in cache.stores]
    assert kept[0] == kept[1]
    tight = fresh(model, tiers=8, max_bytes=fewest - 1)
    with pytest.raises(MemoryBudgetError, match=f"{fewest:,} bytes are needed"):
        feed(model, tight, ids, 700)
    assert tight.stores[0].sequences == []
    feed(model, tight, ids[:1], 700)
    assert lengths(tight) == {700}
