"""Calibration of tiny models: statistics, positions, and what is left behind."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import oracle
from lamina.basis.calibrate import CalibrationConfig, calibrate, forward_hidden
from lamina.basis.encoder import measure_kappa
from lamina.basis.moments import MomentAccumulator
from lamina.codec import CodecConfig
from lamina.errors import ConfigError, DataError, UnsupportedModelError
from tiny_models import KINDS, build, logits_of, profile_of, tokens

SEEN: list[tuple[Tensor, ...]] = []


def recording(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
    out = sdpa_attention_forward(module, q, k, v, mask, **kwargs)
    SEEN.append((q, k, v, out[0]))
    return out


AttentionInterface.register("recording", recording)
AttentionMaskInterface.register("recording", sdpa_mask)


def attention_rows(model: PreTrainedModel, ids: Tensor, offset: int) -> list[tuple[Tensor, ...]]:
    """q, k, v and o of every layer, caught independently of the calibration."""
    SEEN.clear()
    before = model.config._attn_implementation
    model.set_attn_implementation("recording")
    with torch.no_grad():
        forward_hidden(model, ids, offset)
    model.set_attn_implementation(before)
    return list(SEEN)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_are_those_of_the_models_own_rows(kind: str) -> None:
    model = build(kind)
    data = [tokens(2, 256, seed) for seed in (1, 2)]
    profile = calibrate(model, data, CalibrationConfig(max_context=256), model_id="tiny")
    assert profile.info["random_positions"] is False and profile.info["max_position"] == 256
    rows = [attention_rows(model, ids, 0) for ids in data]
    assert len(rows[0]) == len(profile.layers) == 2
    for i, layer in enumerate(profile.layers):
        stats = MomentAccumulator(64, 8, torch.Generator())
        for one in rows:
            stats.update(*one[i])
        expected = stats.result()
        assert layer.moments is not None
        for name in expected.names():
            torch.testing.assert_close(getattr(layer.moments, name), getattr(expected, name), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_position_offsets_leave_hidden_states_unchanged(kind: str) -> None:
    """RoPE is relative, which is what allows calibration at random positions (SPEC 2)."""
    model, ids = build(kind), tokens(1, 100)
    with torch.no_grad():
        near, far = forward_hidden(model, ids, 0), forward_hidden(model, ids, 3000)
    torch.testing.assert_close(near, far, rtol=1e-3, atol=2e-3)
    q, k, *_ = attention_rows(model, ids, 0)[0]
    q_far, k_far, *_ = attention_rows(model, ids, 3000)[0]
    assert float((k - k_far).abs().max()) > 0.5, "the rows themselves turn"
    assert not torch.equal(q, q_far)


def test_random_positions_are_used_recorded_and_seeded() -> None:
    model, data = build("Llama"), [tokens(1, 128, s) for s in range(3)]
    runs = [calibrate(model, data, CalibrationConfig(seed=seed)) for seed in (0, 0, 1)]
    for a, b, same in ((runs[0], runs[1], True), (runs[0], runs[2], False)):
        assert torch.equal(a.layers[1].transform.k_forward, b.layers[1].transform.k_forward) == same
    assert runs[0].info["random_positions"] is True and runs[0].info["max_position"] == 4096
    limited = calibrate(model, data, CalibrationConfig(max_context=1000))
    assert limited.info["max_position"] == 1000


def test_offsets_stay_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    import lamina.basis.calibrate as module

    seen: list[tuple[int, int]] = []

    def spy(model: Any, ids: Tensor, offset: int) -> Tensor:
        seen.append((offset, offset + ids.shape[1]))
        return forward_hidden(model, ids, offset)

    monkeypatch.setattr(module, "forward_hidden", spy)
    calibrate(build("Llama"), [tokens(1, 200, s) for s in range(12)], CalibrationConfig(max_context=700))
    runs = seen[2:]
    assert len(runs) == 12 and all(a >= 0 and b <= 700 for a, b in runs)
    assert len({a for a, _ in runs}) > 8 and max(a for a, _ in runs) > 250


def test_the_models_maximum_bounds_the_positions() -> None:
    """Beyond it dynamic scaling would change the states."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = build("Llama", rope_parameters=rope, max_position_embeddings=256)
    profile = calibrate(model, [tokens(1, 192)], CalibrationConfig(max_context=4096))
    assert profile.info["random_positions"] is True and profile.info["max_position"] == 256


def test_positions_that_are_not_relative_are_noticed() -> None:
    """Where far positions turn rows differently, no offset is used, and the profile says so."""

    class Scaled(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, position_ids: Tensor) -> Any:
            return self.inner(x, position_ids=position_ids * (1 + (position_ids[:, -1:] > 1000)))

    model = build("Llama")
    model.model.rotary_emb = Scaled(model.model.rotary_emb)
    profile = calibrate(model, [tokens(1, 192), tokens(1, 130)])
    assert profile.info["random_positions"] is False and profile.info["max_position"] == 192
    assert calibrate(model, [tokens(1, 192)], CalibrationConfig(max_context=900)).info["random_positions"] is True


def test_absolute_positions_get_no_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    import lamina.basis.calibrate as module

    def drifting(model: Any, ids: Tensor, offset: int) -> Tensor:
        return forward_hidden(model, ids, 0) * (1 + offset / 1000)

    monkeypatch.setattr(module, "forward_hidden", drifting)
    profile = calibrate(build("Llama"), [tokens(1, 300)])
    assert profile.info["random_positions"] is False and profile.info["max_position"] == 300


def test_the_model_is_left_as_it_was() -> None:
    model, ids = build("Qwen2"), tokens(1, 100)
    before, implementation = logits_of(model, ids), model.config._attn_implementation
    calibrate(model, [tokens(1, 200)])
    assert model.config._attn_implementation == implementation
    assert torch.equal(logits_of(model, ids), before)
    assert not any(hasattr(m, "lamina_stats") for m in model.modules())

    def broken() -> Iterator[Tensor]:
        yield tokens(1, 200)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        calibrate(model, broken())
    assert model.config._attn_implementation == implementation
    assert not any(hasattr(m, "lamina_stats") for m in model.modules())


def test_what_a_profile_records() -> None:
    steps: list[int] = []
    settings = CalibrationConfig(transform="oscar", tiers=(4, 2), skip=0)
    profile = calibrate(
        build("Llama"), [tokens(2, 100), tokens(1, 64)], settings, data_digest="abc", progress=steps.append
    )
    assert steps == [200, 264]
    assert profile.transform == "oscar" and profile.tiers == [(4, 2)] * 2 and profile.model_id == "unnamed"
    assert profile.info["tokens"] == 264 and profile.info["data_digest"] == "abc" and profile.info["skip"] == 0
    assert (profile.layers[0].n_kv_heads, profile.layers[0].head_dim, profile.absorbed) == (2, 32, False)


@pytest.mark.parametrize(
    "data", [[], [tokens(1, 100)], [tokens(1, 127), tokens(3, 64)]], ids=["none", "short", "rests"]
)
def test_too_little_text_is_an_error(data: list[Tensor]) -> None:
    with pytest.raises(DataError, match=r"hold no whole page after the first 64 tokens.*give more text"):
        calibrate(build("Llama"), data)


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match="unknown transform 'pca'"):
        CalibrationConfig(transform="pca")
    for settings in ({"skip": -1}, {"reservoir_pages": 0}, {"max_context": 0}):
        with pytest.raises(ConfigError):
            CalibrationConfig(**settings)
    with pytest.raises(UnsupportedModelError, match="head dimension is 24"):
        calibrate(build("Llama", head_dim=24), [tokens(1, 200)])


@pytest.mark.parametrize("rule", ["unbiased", "minmax"])
def test_kappa_is_the_error_in_units_of_the_squared_step(rule: str) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, 64, 64, generator=g) * torch.tensor([1.0, 5.0])[:, None, None]
    kappa = measure_kappa(x, CodecConfig(rule=rule, center=False)).numpy()  # type: ignore[arg-type]
    assert kappa.shape == (2, 3, 3)
    for i, bits in enumerate((2, 4, 8)):
        rows = oracle.quantise(x.numpy(), bits, rule)
        scale, mid = oracle.scale16(rows.scale), oracle.bf16(rows.mid)
        for j, read in enumerate((2, 4, 8)):
            if read > bits:
                assert not kappa[:, i, j].any()
                continue
            gain = np.ones((6, 2, 1))
            if read < bits:
                gain = oracle.scale16(oracle.truncation(x.double().numpy(), rows.codes, scale, bits, read))[..., None]
            back = oracle.decode(rows.codes >> (bits - read), scale, mid, bits, read, gain)
            step = scale * gain * 2 ** (bits - read)
            expected = ((x.numpy() - back) ** 2).mean(-1).sum((0, 2)) / (step**2).sum((0, 2))
            np.testing.assert_allclose(kappa[:, i, j], expected, rtol=0.01)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_kappa_of_calibrated_models_is_about_a_twelfth(kind: str) -> None:
    """A uniform error would give 1/12; 2-bit grids overflow a little."""
    for layer in profile_of(kind).layers:
        for tier in range(3):
            assert ((layer.kappa[:, tier, tier] > 0.06) & (layer.kappa[:, tier, tier] < 0.2)).all()


def test_pages_of_the_reservoir_come_from_every_pass() -> None:
    ids = count()
    stats = MomentAccumulator(0, 3, torch.Generator().manual_seed(0))
    for _ in range(5):
        x = torch.full((1, 1, 64, 16), float(next(ids)))
        stats.update(x, x, x, x.transpose(1, 2))
    assert stats.reservoir()[0].shape == (3, 1, 64, 16) and stats.pages_seen == 5
