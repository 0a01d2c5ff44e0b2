"""Canaries against the drift they stand for, computed in float64 over all rows."""

import numpy as np
import pytest
import torch

from helpers import generator, random_orthogonal
from lamina.codec import ScaleRule
from lamina.codec.rows import dequantise_rows, quantise_rows
from lamina.control.canary import Witnesses, anchored, ring

H, G, D = 2, 3, 32


def quantise(rows: torch.Tensor, bits: int) -> torch.Tensor:
    return dequantise_rows(*quantise_rows(rows, bits, ScaleRule.UNBIASED), bits)


def with_steps(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    return quantise(rows, bits), torch.zeros(rows.shape[:-1])


def setting(n_packed: int, n_exact: int, peaked: float, seed: int = 0) -> dict[str, torch.Tensor]:
    g = generator(seed)
    stretch = torch.linspace(0.5, 2, D, dtype=torch.float64)
    left, right = random_orthogonal(H, D, g), random_orthogonal(H, D, g)
    return {
        "q": torch.randn(H * G, D, generator=g) * peaked,
        "k": torch.randn(H, n_packed + n_exact, D, generator=g),
        "v": torch.randn(H, n_packed + n_exact, D, generator=g),
        "forward": (left * stretch @ right).float(),
        "backward": (left / stretch @ right).float(),
    }


def truth(s: dict[str, torch.Tensor], n_packed: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """KL of the attention distribution with packed keys, and the relative output error with packed values, by head."""
    q, k, v, a = (s[n].double().numpy() for n in ("q", "k", "v", "forward"))
    q = q.reshape(H, G, D) * D**-0.5
    rows = torch.from_numpy(k[:, :n_packed] @ a).float()
    k_read = k.copy()
    k_read[:, :n_packed] = quantise(rows, bits).double().numpy() @ np.linalg.inv(a)
    v_read = v.copy()
    v_read[:, :n_packed] = quantise(torch.from_numpy(v[:, :n_packed]).float(), bits).double().numpy()
    x, y = q @ k.swapaxes(1, 2), q @ k_read.swapaxes(1, 2)
    p, r = (np.exp(z - z.max(-1, keepdims=True)) for z in (x, y))
    p, r = p / p.sum(-1, keepdims=True), r / r.sum(-1, keepdims=True)
    o = p @ v
    kl = (p * np.log(p / r)).sum(-1)
    return kl.ravel(), (((p @ v_read - o) ** 2).sum(-1) / (o**2).sum(-1)).ravel()


def measured(s: dict[str, torch.Tensor], n_packed: int, rows: torch.Tensor, weight: float) -> tuple[dict, dict]:
    q = s["q"].view(H, G, D) * D**-0.5
    x = q @ s["k"].mT
    mass = (x[..., :n_packed].logsumexp(-1) - x.logsumexp(-1)).exp().flatten()
    out = (x.softmax(-1) @ s["v"]).flatten(0, 1)
    k, v = s["k"][:, rows], s["v"][:, rows]
    witnesses = Witnesses(k, v, k @ s["forward"], v, torch.full((len(rows),), weight))
    return anchored(
        s["q"], witnesses, q_forward=s["backward"], scaling=D**-0.5, packed_mass=mass, out=out,
        quantise_k=with_steps, quantise_v=with_steps,
    )  # fmt: skip


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("peaked", [0.5, 3.0])
def test_with_every_row_a_witness_it_is_the_drift_itself(bits: int, peaked: float) -> None:
    s = setting(200, 40, peaked)
    k, v = measured(s, 200, torch.arange(200), 1.0)
    kl, error = truth(s, 200, bits)
    np.testing.assert_allclose(k[bits].numpy(), kl, rtol=0.02, atol=2e-6)
    assert 0.2 < float(v[bits].mean()) / error.mean() < 4, "the sum of many errors, in expectation"


@pytest.mark.parametrize("bits", [2, 4])
def test_few_witnesses_are_right_on_average(bits: int) -> None:
    ratios_k, ratios_v = [], []
    for seed in range(30):
        s = setting(640, 64, 1.0, seed)
        rows = torch.randperm(640, generator=generator(seed))[:32]
        k, v = measured(s, 640, rows, 20.0)
        kl, error = truth(s, 640, bits)
        ratios_k.append(float(k[bits].mean()) / kl.mean())
        ratios_v.append(float(v[bits].mean()) / error.mean())
    assert 0.8 < np.median(ratios_k) < 1.25 and 0.6 < np.median(ratios_v) < 1.6


def test_nothing_packed_is_no_drift_and_extremes_are_finite() -> None:
    s = setting(100, 20, 1.0)
    witnesses = Witnesses(s["k"][:, :10], s["v"][:, :10], s["k"][:, :10], s["v"][:, :10], torch.ones(10))
    for mass, scale in ((0.0, 1.0), (1.0, 200.0), (0.7, 0.0)):
        k, v = anchored(
            s["q"] * scale, witnesses, q_forward=torch.eye(D).repeat(H, 1, 1), scaling=1.0,
            packed_mass=torch.full((H * G,), mass), out=torch.zeros(H * G, D), quantise_k=with_steps,
            quantise_v=with_steps,
        )  # fmt: skip
        for bits in (2, 4, 8):
            assert bool(torch.isfinite(k[bits]).all()) and bool(torch.isfinite(v[bits]).all())
            if mass == 0 or scale == 0:
                assert float(k[bits].abs().max()) < 1e-6


def test_the_ring_is_a_plain_kl_over_its_keys() -> None:
    s = setting(0, 64, 2.0)
    found = ring(s["q"], s["k"], scaling=D**-0.5, quantise=quantise)
    q = s["q"].double().view(H, G, D) * D**-0.5
    for bits in (2, 4, 8):
        p = (q @ s["k"].double().mT).softmax(-1)
        r = (q @ quantise(s["k"], bits).double().mT).softmax(-1)
        np.testing.assert_allclose(found[bits].numpy(), (p * (p / r).log()).sum(-1).flatten(), rtol=1e-3, atol=1e-6)
    assert float(found[2].mean()) > float(found[4].mean()) > float(found[8].mean())
