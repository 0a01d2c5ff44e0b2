"""After calls that fail half way, and other things that must not pass silently."""

import copy
import gc
from typing import Any

import pytest
import torch

from architectures import ARCHITECTURES
from helpers import check_slots, page_contents
from lamina.basis.calibrate import calibrate
from lamina.engines.hf import LaminaCache, cache_kwarg
from lamina.errors import CacheStateError, MemoryBudgetError
from lamina.pages import WindowConfig
from tiny_models import build, logits_of, profile_of, tokens

LINEAR = [a for a in ARCHITECTURES if a.name in ("Qwen3Next", "Lfm2")]


def filled(model: Any, n: int = 40, batch: int = 1, **kwargs: Any) -> LaminaCache:
    cache = LaminaCache(model, profile_of("Llama"), **kwargs)
    logits_of(model, tokens(batch, n), **cache_kwarg(model, cache))
    return cache


def half_way(model: Any, cache: LaminaCache) -> None:
    """A call that fails between two layers."""
    mlp = model.model.layers[0].mlp
    hook = mlp.register_forward_hook(lambda *_: (_ for _ in ()).throw(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        logits_of(model, tokens(1, 5), **cache_kwarg(model, cache))
    hook.remove()


def test_a_cache_that_is_out_of_step_is_neither_copied_nor_remembered(tmp_path) -> None:
    model = build("Llama")
    cache, other = filled(model), filled(model)
    half_way(model, cache)
    for use in (cache.snapshot, lambda: copy.deepcopy(cache), lambda: cache.save(tmp_path / "x"),
                lambda: other.add(cache), lambda: cache.add(other)):  # fmt: skip
        with pytest.raises(CacheStateError, match=r"failed half way; call cache.crop\(40\)"):
            use()
    cache.crop(40)
    assert torch.equal(
        logits_of(model, tokens(1, 5), **cache_kwarg(model, cache)),
        logits_of(model, tokens(1, 5), **cache_kwarg(model, other)),
    )


def test_another_model_is_noticed_within_its_first_call() -> None:
    model, other = build("Llama"), build("Llama")
    cache = filled(model)
    with pytest.raises(CacheStateError, match="does not read this cache"):
        logits_of(other, tokens(1, 1), **cache_kwarg(model, cache))


@pytest.mark.parametrize("architecture", LINEAR, ids=lambda a: a.name)
def test_linear_layers_cannot_take_tokens_back(architecture: Any) -> None:
    """What they have folded in stays, so a failed call or a crop ends the cache, and a snapshot does not."""
    model = architecture.build()
    profile = calibrate(model, [tokens(2, 256, seed=9)])
    cache = LaminaCache(model, profile)
    ids = tokens(1, 43)
    logits_of(model, ids[:, :40], **cache_kwarg(model, cache))
    read, copied = cache.snapshot(), copy.deepcopy(cache)
    expected = logits_of(model, ids[:, 40:41], **cache_kwarg(model, copied))
    mask = torch.ones(1, 41, dtype=torch.long)
    mask[0, 3] = 0
    with pytest.raises(CacheStateError, match="hides tokens"):
        logits_of(model, ids[:, 40:41], attention_mask=mask, **cache_kwarg(model, cache))
    with pytest.raises(CacheStateError, match="linear attention layers have taken its tokens in"):
        logits_of(model, ids[:, 40:41], **cache_kwarg(model, cache))
    cache.restore(read)
    assert torch.equal(logits_of(model, ids[:, 40:41], **cache_kwarg(model, cache)), expected)
    cache.crop(41)
    if architecture.name == "Qwen3Next":
        cache.activate_past_recording()
        with pytest.raises(CacheStateError, match="recurrent state, which cannot forget tokens: take a snapshot"):
            cache.crop(-1)
    joined = copy.deepcopy(cache)
    joined.add(copied)
    both = logits_of(model, ids[:, 41:42].expand(2, -1), **cache_kwarg(model, joined))
    torch.testing.assert_close(both[0], both[1])


def test_rows_are_chosen_by_number_or_by_mask() -> None:
    model = build("Llama")
    cache = filled(model, 70, batch=3)
    store = cache.ours[0].store
    kept = [page_contents(store, b) for b in (0, 2)]
    cache.select(torch.tensor([True, False, True]))
    assert [page_contents(store, b) for b in (0, 1)] == kept
    for wrong in ([1.9, 0.2], torch.tensor([0.0])):
        with pytest.raises(CacheStateError, match="give their numbers"):
            cache.select(wrong)


def test_a_snapshot_that_is_garbage_gives_its_pages_back_at_the_next_call() -> None:
    model = build("Llama")
    cache = filled(model, 200)
    cycle: list[Any] = [cache.snapshot()]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert cache.ours[0].store.snapshots, "not in the middle of whatever was running"
    cache.reset()
    assert sum(cache.memory().values()) == 0


def test_rows_are_added_to_all_layers_or_to_none() -> None:
    model = build("Llama")
    window = WindowConfig(0, 64, 0)
    mine, theirs = filled(model, 300, window=window), filled(model, 300, window=window)
    mine.budget.max_bytes = int(1.4 * mine.budget.used)
    with pytest.raises(MemoryBudgetError):
        mine.add(theirs)
    assert [layer.batch_size for layer in mine.ours] == [1, 1] and mine.lengths == [300]
    for layer in mine.ours:
        check_slots(layer.store)
    logits_of(model, tokens(1, 1), **cache_kwarg(model, mine))


def test_a_chunk_or_a_crop_that_does_not_fit_changes_no_layer() -> None:
    """Under every budget around what is needed: the cache is as before, or it did what it was asked."""
    model, failed = build("Llama"), 0
    held = filled(model, 200, batch=2, tiers=2).budget.used
    for limit in range(held, held + 60_000, 1_500):
        cache = filled(model, 200, batch=2, tiers=2)
        kept = cache.snapshot()
        for ask, before, after in (
            (lambda c: logits_of(model, tokens(2, 90, seed=1), **cache_kwarg(model, c)), 200, 290),
            (lambda c: c.crop(230), 290, 230),
            (lambda c: c.crop(150), 230, 150),
        ):
            cache.budget.max_bytes = limit
            try:
                ask(cache)
            except MemoryBudgetError:
                failed += 1
                assert {layer.seen for layer in cache.ours} == {before} and cache.lengths == [before] * 2
                cache.budget.max_bytes = None
                ask(cache)
            assert {layer.seen for layer in cache.ours} == {after}
            for layer in cache.ours:
                check_slots(layer.store)
        kept.release()
    assert failed > 5


def test_storage_made_in_inference_mode_serves_outside_it() -> None:
    model = build("Llama")
    cache = LaminaCache(model, profile_of("Llama"))
    with torch.inference_mode():
        logits_of(model, tokens(1, 70), **cache_kwarg(model, cache))
    with torch.no_grad():
        logits_of(model, tokens(1, 70), **cache_kwarg(model, cache))
    assert cache.lengths == [140]
