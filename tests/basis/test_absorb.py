"""Folding V's basis into the weights: the model computes the same, its values come in the packed basis."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lamina.basis.absorb import absorb_value_basis
from lamina.basis.profile import Profile
from lamina.engines.hf import LaminaCache, cache_kwarg
from lamina.errors import ConfigError, ProfileError, UnsupportedModelError
from lamina.pages import WindowConfig
from tiny_models import build, logits_of, profile_of, tokens

SHORT = WindowConfig(64, 64, 0)
KINDS = ["Llama", "Qwen2", "Qwen3", "Mistral", "Granite"]


def values_of(model: torch.nn.Module, ids: Tensor) -> list[Tensor]:
    """Rows that every v_proj puts out, ``[B, T, H * D]``."""
    found: list[Tensor] = []
    hooks = [
        m.v_proj.register_forward_hook(lambda module, args, out: found.append(out))
        for m in model.modules()
        if hasattr(m, "v_proj")
    ]
    logits_of(model, ids)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_the_same_function_in_another_basis(kind: str) -> None:
    model, ids, profile = build(kind), tokens(2, 150), profile_of(kind)
    before, values = logits_of(model, ids), values_of(model, ids)
    absorbed = absorb_value_basis(model, profile)
    torch.testing.assert_close(logits_of(model, ids), before, rtol=1e-4, atol=2e-4)
    shape = (*ids.shape, profile.layers[0].n_kv_heads, profile.layers[0].head_dim)
    for old, new, layer in zip(values, values_of(model, ids), profile.layers, strict=True):
        turned = torch.einsum("bthd,hde->bthe", old.view(shape), layer.transform.v_forward)
        torch.testing.assert_close(new.view(shape), turned, rtol=1e-3, atol=2e-3)
    assert absorbed.absorbed and not profile.absorbed


@pytest.mark.parametrize("kind", KINDS)
def test_the_profile_follows(kind: str) -> None:
    profile = profile_of(kind)
    absorbed = absorb_value_basis(build(kind), profile)
    eye = torch.eye(profile.layers[0].head_dim)
    for old, new in zip(profile.layers, absorbed.layers, strict=True):
        assert torch.equal(new.transform.v_forward, eye.expand_as(old.transform.v_forward))
        expected = torch.einsum("hd,hde->he", old.transform.mean_v.double(), old.transform.v_forward.double()).float()
        torch.testing.assert_close(new.transform.mean_v, expected)
        assert torch.equal(new.transform.k_forward, old.transform.k_forward)
        assert torch.equal(new.kappa, old.kappa) and torch.equal(new.v_energy, old.v_energy)
        assert not torch.equal(old.transform.v_forward[0], eye), "the original is left as it was"
    assert (absorbed.config_hash, absorbed.tiers) == (profile.config_hash, profile.tiers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tiers", [(2, 2), (4, 8)])
def test_the_cache_gives_the_same_answers(kind: str, tiers: tuple[int, int]) -> None:
    """The same numbers are coded, up to float32 rounding of the folded weights."""
    model, ids, profile = build(kind), tokens(1, 260), profile_of(kind)
    results = []
    for changed in (False, True):
        if changed:
            profile = absorb_value_basis(model, profile)
        cache = LaminaCache(model, profile, tiers=tiers, window=SHORT)
        caches = cache_kwarg(model, cache)
        logits_of(model, ids[:, :256], **caches)
        results.append(logits_of(model, ids[:, 256:], **caches))
    exact = logits_of(model, ids)[:, 256:]
    noise = float((results[0] - exact).square().mean().sqrt())
    assert noise > 1e-4
    # a code in a thousand may move by one
    assert float((results[0] - results[1]).square().mean().sqrt()) < 0.2 * noise + 1e-3


def test_an_absorbed_profile_survives_saving(tmp_path: Path) -> None:
    model = build("Llama")
    absorbed = absorb_value_basis(model, profile_of("Llama"))
    absorbed.save(tmp_path / "p")
    loaded = Profile.load(tmp_path / "p")
    assert loaded.absorbed
    LaminaCache(model, loaded)


def test_model_and_profile_must_agree() -> None:
    plain, changed, profile = build("Llama"), build("Llama"), profile_of("Llama")
    absorbed = absorb_value_basis(changed, profile)
    for model, p in ((plain, absorbed), (changed, profile)):
        with pytest.raises(ConfigError, match="disagree on whether V's basis was folded"):
            LaminaCache(model, p)
    for model, p in ((changed, profile), (plain, absorbed), (changed, absorbed)):
        with pytest.raises(ProfileError, match="folded into this model before"):
            absorb_value_basis(model, p)
    with pytest.raises(ProfileError, match="does not fit this model"):
        absorb_value_basis(build("Qwen2"), profile)


def test_a_saved_model_remembers(tmp_path: Path) -> None:
    """Otherwise the original profile would be accepted for changed weights after a reload."""
    model = build("Llama")
    absorbed = absorb_value_basis(model, profile_of("Llama"))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    with pytest.raises(ConfigError, match="folded"):
        LaminaCache(loaded, profile_of("Llama"))
    LaminaCache(loaded, absorbed)


def test_a_model_that_cannot_take_it_is_left_as_it_was() -> None:
    """A nonlinearity after v_proj: the output would change, so the weights are put back."""
    model, ids = build("Llama"), tokens(1, 50)
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda module, args, out: out.relu())
    weights = copy.deepcopy(model.state_dict())
    before = logits_of(model, ids)
    with pytest.raises(UnsupportedModelError, match="folding V's basis changes the model's output"):
        absorb_value_basis(model, profile_of("Llama"))
    assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())
    assert torch.equal(logits_of(model, ids), before)
    LaminaCache(model, profile_of("Llama"))


def test_projections_that_cannot_be_found() -> None:
    """Phi-3 keeps q, k and v in one matrix."""
    with pytest.raises(UnsupportedModelError, match="no separate v_proj and o_proj"):
        absorb_value_basis(build("Phi3"), profile_of("Phi3"))


def test_bfloat16_weights() -> None:
    model, ids = build("Qwen2").bfloat16(), tokens(1, 100)
    before = logits_of(model, ids).float()
    absorb_value_basis(model, profile_of("Qwen2"))
    assert model.model.layers[0].self_attn.v_proj.weight.dtype == torch.bfloat16
    assert float((logits_of(model, ids).float() - before).norm() / before.norm()) < 0.05
