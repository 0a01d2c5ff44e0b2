"""The simulated EchoKV cache against its published rules."""

from typing import Any

import pytest
import torch

from lamina.control.config import ControllerConfig
from lamina.engines.hf import cache_kwarg
from lamina.eval.echo import ECHO, EchoCache, echo_controller, grouped
from tiny_models import build, logits_of, profile_of, tokens


def test_codes_are_asymmetric_groups_of_32_channels_a_token() -> None:
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    for bits in (2, 4, 8):
        groups = x.view(2, 5, 2, 32)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        step = (high - low) / (2**bits - 1)
        error = (grouped(x, bits).view(2, 5, 2, 32) - groups).abs()
        assert bool((error <= step * 0.5 + 0.02 * (high - low)).all())
        assert len(grouped(x, bits)[0, 0, :32].unique()) <= 2**bits
    assert torch.equal(grouped(x, 16), x)


def test_sixteen_bits_until_the_first_firing_then_what_it_says() -> None:
    model, ids = build("Llama"), tokens(1, 140)
    cache = EchoCache(model, profile_of("Llama"))
    assert cache.controller is not None and cache.controller.config == ECHO
    exact: Any = model(input_ids=ids[:, :100]).logits
    logits = logits_of(model, ids[:, :100], **cache_kwarg(model, cache))
    torch.testing.assert_close(logits, exact, rtol=0, atol=1e-5)
    assert cache.bits()["history"] == 16 and cache.average_tier == 16
    often = ControllerConfig(canary="ring", policy="threshold", tied=True, tau0=1e9, rate=1 / 8)  # type: ignore[arg-type]
    live = echo_controller(profile_of("Llama"), often)
    cache = EchoCache(model, profile_of("Llama"), live)
    logits_of(model, ids[:, :100], **cache_kwarg(model, cache))
    for t in range(100, 140):
        logits_of(model, ids[:, t : t + 1], **cache_kwarg(model, cache))
    assert live.tiers == [(2, 2)] * 2
    for store in cache.stores:
        assert store.sequences[0].bits.tolist() == [16] * 108 + [2] * 32, "the token of the firing came before it"
        k = store.sequences[0].coded[0][:, 108:]
        assert torch.equal(k, grouped(store.sequences[0].exact[0][:, 108:], 2))
    assert cache.bits()["history"] == pytest.approx((108 * 16 + 32 * 3) / 140), "a scale and a zero for 32 channels"
    elements = 140 * 2 * 32 * 2
    expected = {"codes": elements * 2 * (108 * 16 + 32 * 2) // (140 * 8), "scales": 2 * 32 * 2 * 2 * 32 // 8}
    assert cache.memory() == {**expected, "windows": 0, "ring": 2 * 64 * 2 * 32 * 2}
    again = EchoCache(model, profile_of("Llama"), live)
    assert again.tiers == ((2, 2), (2, 2)), "the state goes on in the next request"


def test_the_ring_is_the_last_64_keys_before_quantisation() -> None:
    model, ids = build("Llama"), tokens(1, 90)
    cache = EchoCache(model, profile_of("Llama"))
    logits_of(model, ids, **cache_kwarg(model, cache))
    store = cache.stores[0]
    assert torch.equal(store.last_keys(0, 64), store.sequences[0].exact[0][:, -64:])
    cache.crop(30)
    assert store.last_keys(0, 64).shape[1] == 30 and cache.lengths == [30]
