"""The four stages against the same errors written out once more, and the orders that any implementation must show."""

import math

import pytest
import torch
from transformers import DynamicCache

from lamina.engines.hf import LaminaCache, cache_kwarg
from lamina.errors import ConfigError, UnsupportedModelError
from lamina.eval.arms import ARMS
from lamina.eval.stages import STAGES, measure_stages
from lamina.eval.studies import STUDIES
from lamina.pages import WindowConfig
from tiny_models import build, profile_of, tokens

SMALL = WindowConfig(64, 64)
IDS = tokens(1, 384, 7)


@pytest.fixture(scope="module")
def model():
    return build("Llama")


def stages(model, *names, ids=IDS, window=SMALL):
    arms = [ARMS[name] if isinstance(name, str) else name for name in names]
    return measure_stages(model, profile_of("Llama"), arms, [ids], window=window)


def relative(read, exact):
    return float((read - exact).norm() / exact.norm())


def attention_of(model, ids):
    """Rotated queries and keys, values and attention weights of each layer, from hooks and eager attention."""
    eager = build("Llama", attn_implementation="eager")
    seen = {}
    for i, layer in enumerate(eager.model.layers):
        layer.self_attn.register_forward_pre_hook(lambda m, a, given, i=i: seen.update({i: given}), with_kwargs=True)
    with torch.no_grad():
        cache = DynamicCache(config=eager.config)
        weights = eager(input_ids=ids, output_attentions=True, **cache_kwarg(eager, cache)).attentions
        rows = []
        for i, layer in enumerate(eager.model.layers):
            x = seen[i]["hidden_states"]
            q = layer.self_attn.q_proj(x)[0].unflatten(-1, (4, 32)).transpose(0, 1)
            cos, sin = (t[0] for t in seen[i]["position_embeddings"])
            turned = torch.cat([-q[..., 16:], q[..., :16]], -1)
            rows.append((q * cos + turned * sin, cache.layers[i].keys[0], cache.layers[i].values[0]))
    return rows, weights


@pytest.mark.parametrize("bits", [2, 4])
def test_every_stage_of_a_layer_is_what_its_definition_says(model, bits):
    """Pages 1 to 3 of 6 are read from codes: per row min/max codes, in the engine's own basis."""
    (found,) = stages(model, f"naive-int{bits}")
    rows, weights = attention_of(model, IDS)
    q, k, v = rows[1]
    coded = slice(64, 256)

    def fake(x):
        low, step = x.amin(-1, keepdim=True), (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / (2**bits - 1)
        return low + step * ((x - low) / step).round()

    k_read, v_read = k.clone(), v.clone()
    k_read[:, coded], v_read[:, coded] = fake(k[:, coded]), fake(v[:, coded])
    q = q[:, -64:]
    k, v, k_read, v_read = (x.repeat_interleave(2, 0) for x in (k, v, k_read, v_read))
    hidden = torch.arange(384) > torch.arange(320, 384)[:, None]
    exact, read = ((q @ x.mT * 32**-0.5).masked_fill(hidden, -math.inf) for x in (k, k_read))
    torch.testing.assert_close(exact.softmax(-1), weights[1][0, :, -64:], atol=1e-5, rtol=1e-3)

    def centred(logits):
        return torch.cat([row[:, : 321 + i] - row[:, : 321 + i].mean(-1, keepdim=True)
                          for i, row in enumerate(logits.unbind(1))], -1)  # fmt: skip

    expected = {
        "cache_k": relative(k_read[:, coded], k[:, coded]),
        "cache_v": relative(v_read[:, coded], v[:, coded]),
        "logits": relative(centred(read), centred(exact)),
        "output": relative(read.softmax(-1) @ v_read, exact.softmax(-1) @ v),
    }
    for name, value in expected.items():
        assert getattr(found.layers[1], name) == pytest.approx(value, rel=0.02), name


def test_the_hidden_state_is_that_of_a_run_with_the_cache(model):
    (found,) = stages(model, "lamina-int2")
    profile = profile_of("Llama")
    with torch.no_grad():
        exact = model(input_ids=IDS, output_hidden_states=True).hidden_states
        cache, before = LaminaCache(model, profile, tiers=2, window=SMALL), model.config._attn_implementation
        for start in range(0, 384, 64):
            chunk = IDS[:, start : start + 64]
            out = model(input_ids=chunk, output_hidden_states=True, **cache_kwarg(model, cache))
    assert before == "lamina"
    model.set_attn_implementation("sdpa")
    error = relative(out.hidden_states[1][0], exact[1][0, -64:])
    assert found.layers[0].hidden == pytest.approx(error, rel=1e-3) and error > 0.05


def test_eight_bits_without_a_rotation_hardly_err_at_any_stage(model):
    eight, two = stages(model, "naive-int8", "naive-int2")
    for fine, coarse in zip(eight.layers, two.layers, strict=True):
        for name in STAGES:
            assert 0 < getattr(fine, name) < 0.01 < 30 * getattr(fine, name) < getattr(coarse, name), name


def test_v_at_more_bits_leaves_keys_and_logits_alone(model):
    two, four = stages(model, "lamina-int2", "lamina-k2v4")
    for a, b in zip(two.layers, four.layers, strict=True):
        assert (a.cache_k, a.logits) == (b.cache_k, b.logits)
        assert b.cache_v < a.cache_v / 3 and b.output < a.output


def test_the_mass_correction_is_part_of_logits_but_not_of_rows(model):
    plain, corrected = stages(model, STUDIES["codec"].arms[1], STUDIES["codec"].arms[0])
    assert plain.layers[0].cache_k == corrected.layers[0].cache_k
    assert plain.layers[0].logits != corrected.layers[0].logits


def test_windows_leave_nothing_to_err(model):
    (found,) = stages(model, "naive-int2", window=WindowConfig(64, 320))
    for layer in found.layers:
        assert math.isnan(layer.cache_k) and math.isnan(layer.cache_v)
        assert layer.logits == layer.output == 0.0 and layer.hidden < 1e-5
    assert math.isnan(found.mean.cache_k) and found.mean.logits == 0.0


def test_averages_simulated_arms_and_a_page_that_is_not_full(model):
    kivi, exact = stages(model, "kivi-int2", "bf16", ids=IDS[:, :350])
    assert (kivi.simulated, exact.simulated) == (True, False)
    assert kivi.mean.output == pytest.approx(sum(s.output for s in kivi.layers) / 2)
    assert all(0.1 < getattr(kivi.mean, name) < 0.6 for name in STAGES)
    assert all(1e-4 < getattr(exact.mean, name) < 1e-2 for name in STAGES)


def test_groups_of_a_whole_head_are_what_pages_store(model):
    stored, grouped = stages(model, STUDIES["rotation"].arms[4], STUDIES["group"].arms[-1])
    assert grouped.layers[0].cache_k == pytest.approx(stored.layers[0].cache_k, rel=1e-4)
    assert grouped.layers[1].output == pytest.approx(stored.layers[1].output, rel=1e-4)


@pytest.mark.parametrize("name", ["echokv", "lamina-live-3"])
def test_arms_that_decide_while_running_are_refused(model, name):
    with pytest.raises(ConfigError, match="decides its bits while it runs"):
        stages(model, name)


def test_capped_logits_are_refused_and_the_model_left_as_it_was(model, monkeypatch):
    monkeypatch.setattr("lamina.eval.stages.layer_scaling", lambda model, dims: [3 * d**-0.5 for d in dims])
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match="layer 0: attention recomputed"):
        stages(model, "lamina-int2")
    assert model.config._attn_implementation == before
