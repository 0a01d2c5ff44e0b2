"""generate() with a LaminaCache: greedy, sampled, batched, with drafts, over several turns."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from helpers import page_contents
from lamina.basis.calibrate import calibrate
from lamina.basis.profile import Profile
from lamina.engines.hf import LaminaCache, cache_kwarg
from lamina.errors import CacheStateError
from lamina.pages import WindowConfig
from tiny_models import KINDS, PAD, build, logits_of, tokens

SHORT = WindowConfig(64, 64, 64)
CALM = {"initializer_range": 0.05}
"""Attention that no single row decides, so that greedy margins are wider than INT8's error."""


@pytest.fixture(scope="module")
def profiles() -> dict[str, Profile]:
    data = [tokens(2, 384, 100)]
    return {kind: calibrate(build(kind, **CALM), data) for kind in ("Llama", "Qwen2", "Qwen3")}


def generate(model: PreTrainedModel, ids: Tensor, n: int, cache: Any = None, **options: Any) -> Any:
    caches = cache_kwarg(model, cache) if cache is not None else {}
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, pad_token_id=PAD, return_dict_in_generate=True,
        **{"do_sample": False, "output_logits": True} | options, **caches,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_greedy_at_8_bits_equals_the_plain_cache_far_past_the_windows(kind: str, profiles: dict[str, Profile]) -> None:
    model, ids = build(kind, **CALM), tokens(1, 200, seed=1)
    plain = generate(model, ids, 150, DynamicCache())
    ours = generate(model, ids, 150, LaminaCache(model, profiles[kind], tiers=8, window=SHORT))
    expected, logits = torch.stack(plain.logits, 1), torch.stack(ours.logits, 1)
    margin = expected.topk(2).values.diff().abs().min()
    error = (logits - expected).abs()
    assert torch.equal(ours.sequences, plain.sequences)
    assert float(error.max()) < float(margin) / 2, "the comparison is not a matter of luck"
    assert float(error[:, 1:].max()) > 1e-6, "packed rows were read"


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_within_the_windows_draws_the_same_tokens(kind: str) -> None:
    from tiny_models import profile_of

    model, ids = build(kind), tokens(2, 100)
    drawn = []
    for cache in (DynamicCache(), LaminaCache(model, profile_of(kind), tiers=2)):
        torch.manual_seed(11)
        drawn.append(generate(model, ids, 40, cache, do_sample=True, temperature=0.8, top_k=20).sequences)
    assert torch.equal(drawn[0], drawn[1])


def test_sampling_repeats_with_its_seed(profiles: dict[str, Profile]) -> None:
    model, ids = build("Llama", **CALM), tokens(1, 250)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        cache = LaminaCache(model, profiles["Llama"], tiers=2, window=SHORT)
        drawn.append(generate(model, ids, 30, cache, do_sample=True).sequences)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_a_batch_equals_its_sequences_alone(profiles: dict[str, Profile]) -> None:
    model, ids = build("Qwen2", **CALM), tokens(3, 220, seed=1)
    cache = LaminaCache(model, profiles["Qwen2"], tiers=(4, 2), window=SHORT)
    together = generate(model, ids, 40, cache)
    for b in range(3):
        alone_cache = LaminaCache(model, profiles["Qwen2"], tiers=(4, 2), window=SHORT)
        alone = generate(model, ids[b : b + 1], 40, alone_cache)
        torch.testing.assert_close(
            torch.stack(together.logits, 1)[b], torch.stack(alone.logits, 1)[0], rtol=0, atol=5e-3
        )
        assert torch.equal(together.sequences[b], alone.sequences[0])


def test_a_plain_loop_equals_generate(profiles: dict[str, Profile]) -> None:
    model, ids = build("Qwen3", **CALM), tokens(1, 200, seed=1)
    expected = generate(model, ids, 60, LaminaCache(model, profiles["Qwen3"], tiers=4, window=SHORT))
    cache = LaminaCache(model, profiles["Qwen3"], tiers=4, window=SHORT)
    new, out = ids, ids
    for logits in expected.logits:
        ours = logits_of(model, new, **cache_kwarg(model, cache))[:, -1]
        torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)
        new = ours.argmax(-1, keepdim=True)
        out = torch.cat([out, new], 1)
    assert torch.equal(out, expected.sequences)
    assert cache.get_seq_length() == 259


def test_a_second_turn_continues_the_cache(profiles: dict[str, Profile]) -> None:
    model, ids = build("Llama", **CALM), tokens(1, 150, seed=1)
    cache = LaminaCache(model, profiles["Llama"], tiers=8, window=SHORT)
    first = generate(model, ids, 30, cache).sequences
    prompt = torch.cat([first, tokens(1, 90, seed=2)], 1)
    second = generate(model, prompt, 40, cache)
    assert cache.get_seq_length() == 150 + 30 + 90 + 39
    plain = generate(model, prompt, 40, DynamicCache())
    assert torch.equal(second.sequences, plain.sequences)


def test_drafts_in_a_second_turn_are_refused(profiles: dict[str, Profile]) -> None:
    """Transformers reads the whole prompt again then, tokens that the cache holds included."""
    model, ids = build("Llama", **CALM), tokens(1, 100, seed=1)
    cache = LaminaCache(model, profiles["Llama"], tiers=8)
    first = generate(model, ids, 8, cache).sequences
    prompt = torch.cat([first, tokens(1, 24, seed=2)], 1)
    for draft in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": build("Llama", **CALM)}):
        with pytest.raises(CacheStateError, match=r"holds 107 tokens, and this call .* reads tokens again"):
            generate(model, prompt, 8, cache, output_logits=False, **draft)
    assert cache.get_seq_length() == 107
    generate(model, prompt, 8, cache)
    assert cache.get_seq_length() == 107 + 25 + 7


@pytest.mark.parametrize("n", [1, 3, 10])
def test_prompt_lookup_drafts_change_nothing(n: int, profiles: dict[str, Profile]) -> None:
    """Drafts are appended and rolled back; all of them, some or none may be accepted."""
    model = build("Qwen2", **CALM)
    ids = tokens(1, 40, seed=1).repeat(1, 5)
    expected = generate(model, ids, 120, LaminaCache(model, profiles["Qwen2"], tiers=8, window=SHORT)).sequences
    cache = LaminaCache(model, profiles["Qwen2"], tiers=8, window=SHORT)
    ours = generate(model, ids, 120, cache, prompt_lookup_num_tokens=n, output_logits=False).sequences
    assert torch.equal(ours, expected)
    assert expected[0, -20:].unique().numel() < 20, "drafts are found only where the text repeats"


def test_rolling_back_drafts_equals_never_having_seen_them(profiles: dict[str, Profile]) -> None:
    model, ids = build("Llama", **CALM), tokens(2, 300, seed=1)
    runs = []
    for draft in (False, True):
        cache = LaminaCache(model, profiles["Llama"], tiers=2, window=SHORT)
        caches = cache_kwarg(model, cache)
        logits_of(model, ids[:, :250], **caches)
        if draft:
            logits_of(model, tokens(2, 40, seed=9), **caches)
            cache.crop(-40)
        logits = [logits_of(model, ids[:, t : t + 1], **caches) for t in range(250, 300)]
        runs.append((torch.cat(logits, 1), [page_contents(layer.store, 1) for layer in cache.layers]))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]
