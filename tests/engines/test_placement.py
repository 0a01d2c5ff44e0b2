"""Models whose layers are spread over devices by accelerate, and models that are compiled."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lamina.engines.hf import LaminaCache, cache_kwarg
from lamina.pages import WindowConfig
from tiny_models import build, logits_of, profile_of, tokens


def run(model: torch.nn.Module, inner: torch.nn.Module) -> tuple[Tensor, LaminaCache]:
    """Logits of a prompt and of single tokens, far enough for packed pages."""
    cache = LaminaCache(inner, profile_of("Llama"), tiers=(4, 2), window=WindowConfig(recent=64))
    ids = tokens(2, 330)
    logits = [logits_of(model, ids[:, :300], **cache_kwarg(inner, cache))]
    logits += [logits_of(model, ids[:, t : t + 1], **cache_kwarg(inner, cache)) for t in range(300, 330)]
    return torch.cat(logits, 1), cache


def test_device_map(tmp_path: Path) -> None:
    """Accelerate moves what a layer is given, and must not touch the cache or the handle on the keys."""
    accelerate = pytest.importorskip("accelerate")
    plain, model = build("Llama"), build("Llama")
    expected, _ = run(plain, plain)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    accelerate.dispatch_model(
        model, places | {"model.rotary_emb": "cpu", "lm_head": "disk"}, main_device="cpu", offload_dir=tmp_path
    )
    logits, cache = run(model, model)
    assert torch.equal(logits, expected) and cache.lengths == [330, 330]
    cache.save(tmp_path / "cache.safetensors")
    again = LaminaCache.load(tmp_path / "cache.safetensors", model, profile_of("Llama"))
    token = tokens(2, 1, seed=5)
    assert torch.equal(
        logits_of(model, token, **cache_kwarg(model, again)), logits_of(model, token, **cache_kwarg(model, cache))
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_models() -> None:
    """Graphs break around the cache, and nothing else changes."""
    torch._dynamo.reset()
    model = build("Llama")
    expected, _ = run(model, model)
    logits, _ = run(torch.compile(model, backend="eager"), model)
    assert torch.equal(logits, expected)
