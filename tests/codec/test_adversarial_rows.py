"""Rows that break naive scale rules: no variance, one spike, a large offset, the smallest and largest numbers."""

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from lamina.codec import ScaleRule, decode_pages, encode_pages
from lamina.codec.page import decode_center

DIM = 64
SLABS = {2: 1, 4: 2, 8: 4}


def round_trip(x: Tensor, bits: int, rule: ScaleRule, center: bool, read: int | None = None) -> Tensor:
    e = encode_pages(x, bits, rule, center=center, clip_ratio=0.92)
    rows = decode_pages(e.slabs[: SLABS[read or bits]], e.scale, e.mid, e.gain, bits)
    if e.center is not None and e.center_scale is not None:
        rows = rows + decode_center(e.center, e.center_scale)[:, :, None]
    return rows


matrix = [
    pytest.param(bits, rule, center, id=f"{bits}-{rule}-{'centered' if center else 'plain'}")
    for bits in (2, 4, 8)
    for rule in ScaleRule
    for center in (True, False)
]


@pytest.mark.parametrize("value", [0.0, 1.0, -3.7, 100.0, 1e5, 1e-30])
@pytest.mark.parametrize(("bits", "rule", "center"), matrix)
def test_constant_rows_come_back_as_their_mean(bits: int, rule: ScaleRule, center: bool, value: float) -> None:
    x = torch.full((1, 2, 64, DIM), value)
    back = round_trip(x, bits, rule, center)
    assert torch.isfinite(back).all()
    assert float((back - x).abs().max()) <= abs(value) * 2.0**-8
    if value == 0:
        assert torch.equal(back, x)


@pytest.mark.parametrize(("bits", "rule", "center"), matrix)
def test_a_spike_of_1e5_survives(bits: int, rule: ScaleRule, center: bool) -> None:
    """Float16 scales would overflow; the step of a min/max grid is 1e5 / 3 at 2 bits."""
    x = torch.randn(1, 1, 64, DIM, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    x[0, 0, 5, 7] = torch.tensor(1e5).bfloat16().float()
    back = round_trip(x, bits, rule, center)
    assert torch.isfinite(back).all()
    others = [t for t in range(64) if t != 5]
    # the center moves by 1e5/64 on one channel, for every row of the page: at most that channel is hurt
    quiet = [c for c in range(DIM) if c != 7 or not center]
    if not center:
        calm = round_trip(x[:, :, others][:, :, [*range(63), 0]], bits, rule, center)[:, :, :63]
        assert torch.equal(back[:, :, others], calm)
    else:
        limit = {2: 1200.0, 4: 300.0, 8: 15.0}[bits]
        assert float((back - x)[0, 0][others][:, quiet].abs().max()) < limit
    if rule is not ScaleRule.CLIP or bits > 2:
        reach = 1e5 / (2**bits - 1) if bits == 8 or rule is ScaleRule.MINMAX else 0.7e5
        assert float((back - x)[0, 0, 5, 7].abs()) <= reach * 1.02


@pytest.mark.parametrize(("bits", "rule", "center"), matrix)
def test_rows_of_100_and_a_little_noise(bits: int, rule: ScaleRule, center: bool) -> None:
    noise = torch.rand(1, 2, 64, DIM, generator=torch.Generator().manual_seed(0)) * 2e-3 - 1e-3
    x = 100 + noise
    back = round_trip(x, bits, rule, center)
    # without a center the midpoint's own 16 bits bound the error, with one the center leaves at most half its step
    bound = 100 * 2.0**-8 if not center else 100 / 127 / 2 * 2.0**-7 + 4e-3
    assert float((back - x).abs().max()) <= bound


def test_a_page_offset_costs_nothing_with_a_center() -> None:
    """Each channel 100 away, other channels -100: a min/max grid alone would lose the noise entirely."""
    g = torch.Generator().manual_seed(0)
    offset = 100 * torch.where(torch.rand(1, 2, 1, DIM, generator=g) > 0.5, 1.0, -1.0)
    x = offset + torch.randn(1, 2, 64, DIM, generator=g)
    with_center = float((round_trip(x, 2, ScaleRule.UNBIASED, True) - x).square().mean())
    without = float((round_trip(x, 2, ScaleRule.UNBIASED, False) - x).square().mean())
    assert with_center < 0.3 and without > 0.5


@pytest.mark.parametrize("size", [1e-39, 1e-36, 1e-20, 1e18])
@pytest.mark.parametrize(("bits", "rule", "center"), matrix)
def test_tiny_and_huge_rows_stay_finite_and_bounded(bits: int, rule: ScaleRule, center: bool, size: float) -> None:
    x = torch.randn(1, 1, 64, DIM, generator=torch.Generator().manual_seed(0)) * size
    back = round_trip(x, bits, rule, center)
    assert torch.isfinite(back).all()
    assert float((back / size - x / size).abs().max()) < 4.5
    if size > 1e-19:
        relative = float((back / size - x / size).square().mean())
        assert relative < {2: 0.6, 4: 0.04, 8: 1e-3}[bits]


@pytest.mark.parametrize(("bits", "rule", "center"), matrix)
def test_two_valued_rows_are_nearly_exact(bits: int, rule: ScaleRule, center: bool) -> None:
    """A least-squares fit that divided by zero, or an unclamped rescaling, would show here."""
    g = torch.Generator().manual_seed(3)
    x = torch.where(torch.rand(1, 1, 64, DIM, generator=g) > 0.03, 1.0, 5.0)
    back = round_trip(x, bits, rule, center)
    error = float((back - x).square().mean())
    assert error < {2: 0.25, 4: 0.012, 8: 1e-4}[bits] if rule is not ScaleRule.CLIP or bits > 2 else error < 1.0


@pytest.mark.parametrize("bits", [2, 4])
def test_the_last_rescaling_is_clamped(bits: int) -> None:
    """One outlier among equals: energy / dot explodes when the codes miss the row, the clamp keeps it within two."""
    x = np.zeros((1, 1, 64, 16), np.float32)
    rng = np.random.default_rng(0)
    x[..., 0] = rng.standard_normal((1, 1, 64)) * 1e3
    x += rng.standard_normal(x.shape).astype(np.float32)
    e = encode_pages(torch.from_numpy(x), bits, ScaleRule.UNBIASED, center=False)
    expected = oracle.quantise(x, bits, "unbiased")
    keep = ~expected.near_row & ~expected.near.any(-1)
    ours, theirs = oracle.read_scale16(e.scale.numpy()), oracle.scale16(expected.scale)
    assert keep.mean() > 0.9
    assert (abs(ours - theirs) <= oracle.unit_of(theirs, 8))[keep].all()
