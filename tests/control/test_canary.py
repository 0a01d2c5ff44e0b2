"""Canaries against the drift they stand for, computed in float64 over all rows."""

import numpy as np
import pytest
import torch

from helpers import generator, layer_profile, make_store, stored
from lamina.attention.reference import attend_reference
from lamina.codec import TIERS, CodecConfig, ScaleRule
from lamina.codec.gaussian import gaussian_rows
from lamina.codec.rows import dequantise_rows, quantise_rows
from lamina.control.canary import anchored, ring
from lamina.pages import WindowConfig

H, G, D = 2, 3, 64
WINDOW = WindowConfig(sink=64, recent=64, rollback=0)


def quantise(rows: torch.Tensor, bits: int) -> torch.Tensor:
    return dequantise_rows(*quantise_rows(rows, bits, ScaleRule.UNBIASED), bits)


def rows_of(tokens: int, heavy: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query ``[1, H * G, 1, D]``, keys and values; ``heavy`` packed rows of K head take most of the attention."""
    g = generator(seed)
    q = torch.randn(1, H * G, 1, D, generator=g)
    k, v = torch.randn(2, 1, H, tokens, D, generator=g)
    for h in range(H):
        at = 64 + torch.randperm(tokens - 300, generator=g)[:heavy]
        toward = q[0, h * G : (h + 1) * G, 0].mean(0)
        k[0, h, at] += 12 * D**0.5 * toward / toward.square().sum()
    return q, k, v


def predicted_and_true(
    heavy: int,
    from_bits: int,
    bits: int,
    rule: str = "unbiased",
    softcap: float = 0.0,
    seed: int = 0,
    tokens: int = 900,
) -> tuple[np.ndarray, np.ndarray]:
    """Of K and V, averaged over heads: what a cache at ``from_bits`` predicts for ``bits``, and what these really do.

    The truth reads the rows of the predicted tier, K alone or V alone, and compares with attention over exact rows.
    """
    codec = CodecConfig(rule=rule)  # type: ignore[arg-type]
    profile = layer_profile(H, D, seed=3)
    q, k, v = rows_of(tokens, heavy, seed)
    v += profile.transform.mean_v[:, None]
    found = []
    for tier in (from_bits, bits):
        store, basis = make_store(H, D, tiers=(tier, tier), window=WINDOW, codec=codec, profile=profile)
        store.append(k, v)
        basis.rows, basis.softcap = gaussian_rows(codec, D), softcap
        found.append((store.view(), basis, attend_reference(q, store.view(), basis)))
    result = found[0][2]
    assert result.spread is not None
    said_k, said_v = anchored(result.spread[0, :, 0], result.out[0, 0], gaussian_rows(codec, D))
    return (
        np.array([float(said_k[bits].mean()), float(said_v[bits].mean())]),
        truth(q, k, v, *found[1][:2], softcap),
    )


def truth(q, k, v, view, basis, softcap):
    """By numpy in float64: KL of the attention distribution, and relative squared error of the output."""
    s, position = stored(view), k.shape[2] - 1
    k_read, v_read = k[0].double().numpy().copy(), v[0].double().numpy().copy()
    k, v = k_read.copy(), v_read.copy()
    shift = np.zeros((H, G, k.shape[1]))
    q = q[0, :, 0].double().numpy().reshape(H, G, D) * basis.scaling
    forward, backward = basis.q_forward.double().numpy(), basis.v_back.double().numpy().swapaxes(1, 2)
    for page in s.page_ids[0]:
        start = int(s.table[page, 0])
        if start < 64 or start >= position // 64 * 64 - 64 or s.table[page, 2] == 0:
            continue
        rows, step = s.read(page, 0)
        at = slice(start, start + 64)
        k_read[:, at] = rows @ forward.swapaxes(1, 2)
        v_read[:, at] = s.read(page, 1)[0] @ backward + basis.mean_v.double().numpy()[:, None]
        tier = {2: 0, 4: 1, 8: 2}[int(s.table[page, 2])]
        energy = ((q @ forward) ** 2).sum(-1)
        shift[..., at] = energy[..., None] * basis.kappa[:, tier, tier].numpy()[:, None, None] * step[:, None] ** 2 / 2
    x, y = q @ k.swapaxes(1, 2), q @ k_read.swapaxes(1, 2) - shift
    if softcap:
        x, y = softcap * np.tanh(x / softcap), softcap * np.tanh(y / softcap)
    p, r = (np.exp(z - z.max(-1, keepdims=True)) for z in (x, y))
    p, r = p / p.sum(-1, keepdims=True), r / r.sum(-1, keepdims=True)
    o = p @ v
    error = ((p @ v_read - o) ** 2).sum(-1) / (o**2).sum(-1)
    return np.array([(p * np.log(p / r)).sum(-1).mean(), error.mean()])


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("from_bits", [2, 4, 8])
@pytest.mark.parametrize("heavy", [0, 3])
def test_it_predicts_the_drift_of_any_tier_from_any_tier(heavy: int, from_bits: int, bits: int) -> None:
    """Over many heads: attention spread over all rows, or on three of them that no sample would hold."""
    runs = [predicted_and_true(heavy, from_bits, bits, seed=s) for s in range(12)]
    said, true = (np.sum(x, 0) for x in zip(*runs))
    assert 0.6 < said[0] / true[0] < 1.6, "K"
    assert 0.7 < said[1] / true[1] < 1.4, "V"


@pytest.mark.parametrize(("rule", "softcap"), [("minmax", 0.0), ("unbiased", 4.0)])
def test_other_rules_and_capped_logits(rule: str, softcap: float) -> None:
    runs = [predicted_and_true(3, 4, 2, rule, softcap, seed=s) for s in range(12)]
    said, true = (np.sum(x, 0) for x in zip(*runs))
    assert 0.5 < said[0] / true[0] < 2 and 0.6 < said[1] / true[1] < 1.6


def test_nothing_packed_is_no_drift_and_extremes_are_finite() -> None:
    rows = gaussian_rows(CodecConfig(), D)
    for spread in (torch.zeros(H * G, 3), torch.full((H * G, 3), 1e20)):
        k, v = anchored(spread, torch.zeros(H * G, D), rows)
        for bits in TIERS:
            assert bool(torch.isfinite(k[bits]).all()) and bool(torch.isfinite(v[bits]).all())
            assert not bool(spread.any()) or float(v[bits].min()) > 0
    k, v = anchored(torch.tensor([[0.1, 0.2, 0.3]]), torch.ones(1, D), rows)
    assert float(k[2]) == 0, "rounding may not make it negative"


def test_gaussian_rows_by_hand() -> None:
    """The error of a 2-bit code of a Gaussian, textbook 0.1188, and that of many bits, step squared over twelve."""
    rows = gaussian_rows(CodecConfig(), 64)
    for side in (0, 1):
        assert rows.error[side][0] == pytest.approx(0.125, abs=0.015)
        assert rows.error[side][2] * rows.variance[side][2] == pytest.approx(1 / 12, rel=0.05)
        assert rows.error[side][0] > 8 * rows.error[side][1] > 64 * rows.error[side][2]
    assert rows.aligned and not gaussian_rows(CodecConfig(rule=ScaleRule.MINMAX), 64).aligned


def test_the_ring_is_a_plain_kl_over_its_keys() -> None:
    g = generator(0)
    q, k = torch.randn(H * G, D, generator=g) * 2, torch.randn(H, 64, D, generator=g)
    found = ring(q, k, scaling=D**-0.5, quantise=quantise)
    q = q.double().view(H, G, D) * D**-0.5
    for bits in TIERS:
        p = (q @ k.double().mT).softmax(-1)
        r = (q @ quantise(k, bits).double().mT).softmax(-1)
        np.testing.assert_allclose(found[bits].numpy(), (p * (p / r).log()).sum(-1).flatten(), rtol=1e-3, atol=1e-6)
    assert float(found[2].mean()) > float(found[4].mean()) > float(found[8].mean())
