"""A prompt that is read once leaves every arm's cache as if the model had read it with that cache."""

import pytest
import torch
from transformers import DynamicCache

from architectures import ARCHITECTURES
from lamina.basis.calibrate import calibrate
from lamina.engines.hf import ATTENTION, LaminaCache, cache_kwarg
from lamina.eval.arms import ARMS
from lamina.eval.bf16 import Bf16Cache
from lamina.eval.reading import ReadPrompt
from lamina.pages import WindowConfig
from tiny_models import build, logits_of, profile_of, tokens

WINDOW = WindowConfig(64, 64, 0)
FIXED = [name for name, arm in ARMS.items() if not name.startswith("lamina-live")]


MIXED = [a for a in ARCHITECTURES if a.name in ("Gemma3Text", "Qwen3Next")]


def own_and_given(name: str):
    """An arm's cache that the model filled, and one that was given the same prompt."""
    model, profile, ids, arm = build("Llama"), profile_of("Llama"), tokens(1, 400), ARMS[name]
    new = arm.open(model, arm.profile(profile), WINDOW)
    own, given = new(), new()
    logits_of(model, ids[:, :-1], **cache_kwarg(model, own))
    ReadPrompt(model, ids).fill(given)
    return model, ids, own, given


@pytest.mark.parametrize("name", FIXED)
def test_the_cache_is_the_one_that_the_model_would_have_filled(name) -> None:
    model, ids, own, given = own_and_given(name)
    assert given.get_seq_length() == 399
    if name != "bf16":
        assert given.bits() == own.bits() and given.memory() == own.memory()
        for a, b in zip(own.stores, given.stores, strict=True):
            assert a.sequences[0].length == b.sequences[0].length == 399
    for t in range(399, 402):
        step = ids[:, [t % 400]]
        found, expected = (logits_of(model, step, **cache_kwarg(model, cache)) for cache in (given, own))
        # The bf16 cache rounds rows before the prompt's own attention reads them, too.
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-2 if name == "bf16" else 1e-5)


@pytest.mark.parametrize("architecture", MIXED, ids=lambda a: a.name)
def test_layers_that_stay_with_transformers_are_given_too(architecture) -> None:
    if architecture.missing:
        pytest.skip(architecture.missing)
    model, ids = architecture.build(), tokens(1, 400)
    profile = calibrate(model, [tokens(2, 384, 9)])
    own, *given = (LaminaCache(model, profile, tiers=2, window=WINDOW) for _ in range(3))
    assert own.hosts, "else this tests nothing"
    logits_of(model, ids[:, :-1], **cache_kwarg(model, own))
    read = ReadPrompt(model, ids)
    for cache in given:
        read.fill(cache)
    expected, *found = (logits_of(model, ids[:, -1:], **cache_kwarg(model, cache)) for cache in (own, *given))
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_a_prompt_of_one_token_leaves_the_cache_empty() -> None:
    model = build("Llama")
    cache = Bf16Cache(model)
    ReadPrompt(model, tokens(1, 1)).fill(cache)
    assert cache.get_seq_length() == 0


def test_only_caches_of_arms_are_filled() -> None:
    model = build("Llama")
    with pytest.raises(TypeError, match="DynamicCache is not the cache of an arm"):
        ReadPrompt(model, tokens(1, 80)).fill(DynamicCache(config=model.config))
    assert model.config._attn_implementation == ATTENTION
