"""Stored codes, scales, midpoints, centers and gains against the float64 oracle."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from lamina.codec import EncodedPages, ScaleRule, encode_pages

DIMS = (16, 64, 80, 96, 112, 128, 192, 256)
CLIP = {True: 0.96, False: 0.92}


def rows(seed: int, n: int, heads: int, dim: int) -> np.ndarray:
    """Rows of many sizes, some heavy-tailed, with an offset a head; representable in float32."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, heads, 64, dim)) * np.exp(rng.standard_normal((n, heads, 64, 1)))
    x[:, :, :32] *= np.exp(0.5 * rng.standard_normal((n, heads, 32, dim)))
    return (x + rng.standard_normal((1, heads, 1, dim))).astype(np.float32)


def stored(e: EncodedPages) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and midpoints as the bytes say."""
    codes = oracle.unpack([s.numpy() for s in e.slabs])
    return codes, oracle.read_scale16(e.scale.numpy()), oracle.read_bf16(e.mid.view(torch.int16).numpy())


def centred(x: np.ndarray, e: EncodedPages, border: float) -> np.ndarray:
    """X without the stored page center, which is checked on the way."""
    assert e.center is not None and e.center_scale is not None
    ratio, scale = oracle.page_center(x.astype(np.float64))
    assert np.array_equal(oracle.read_scale16(e.center_scale.numpy()), scale)
    clear = abs(ratio - np.floor(ratio) - 0.5) > border * 10
    codes = e.center.numpy().astype(np.float64)
    assert np.array_equal(codes[clear], np.clip(np.round(ratio), -127, 127)[clear])
    assert clear.mean() > 0.99
    return x - (codes * scale[..., None])[:, :, None]


@pytest.mark.parametrize(("center", "dtype"), [(True, torch.float32), (False, torch.float32), (False, torch.float64)])
@pytest.mark.parametrize("rule", list(ScaleRule))
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_pages_equal_the_oracle(bits: int, rule: ScaleRule, center: bool, dtype: torch.dtype) -> None:
    # float32 resolves 256 codes to 1.5e-5 of a code
    border = 1e-9 if dtype is torch.float64 else {2: 1e-5, 4: 1e-5, 8: 3e-5}[bits]
    excluded = total = 0
    for i, dim in enumerate(DIMS):
        x = rows(i, 1, 1 + i % 3, dim)
        e = encode_pages(torch.from_numpy(x).to(dtype), bits, rule, center=center, clip_ratio=CLIP[center])
        assert e.bits == bits
        if center:
            x = centred(x, e, border)
        expected = oracle.quantise(x, bits, str(rule), CLIP[center], border)
        codes, scale, mid = stored(e)
        sure = ~expected.near_row
        excluded, total = excluded + int((~sure).sum()), total + sure.size
        assert np.array_equal(codes[sure][~expected.near[sure]], expected.codes[sure][~expected.near[sure]])
        steady = sure & ~expected.near.any(-1)
        assert (abs(scale - oracle.scale16(expected.scale)) <= oracle.unit_of(expected.scale, 8))[steady].all()
        mid_slack = oracle.unit_of(expected.mid, 7) + 1e-6 * expected.scale * 2**bits
        assert (abs(mid - oracle.bf16(expected.mid)) <= mid_slack)[steady].all()
        assert (scale == oracle.scale16(expected.scale))[steady].mean() > 0.99
    assert excluded < 0.02 * total


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("rule", list(ScaleRule))
@pytest.mark.parametrize(("bits", "read"), [(4, 2), (8, 2), (8, 4)])
def test_truncation_gains_and_errors(bits: int, read: int, rule: ScaleRule, center: bool) -> None:
    x = rows(7, 3, 2, 96)
    e = encode_pages(torch.from_numpy(x), bits, rule, center=center, clip_ratio=0.9)
    if center:
        x = centred(x, e, 1e-5)
    codes, scale, mid = stored(e)
    i = (2, 4).index(read)
    expected = oracle.truncation(x.astype(np.float64), codes, scale, bits, read)
    gain = oracle.read_scale16(e.gain.numpy())[..., i]
    assert (abs(gain - oracle.scale16(expected)) <= oracle.unit_of(expected, 8)).all()
    full = ((x - oracle.decode(codes, scale, mid, bits, bits)) ** 2).mean((-1, -2))
    cut = ((x - oracle.decode(codes >> (bits - read), scale, mid, bits, read, gain[..., None])) ** 2).mean((-1, -2))
    np.testing.assert_allclose(e.truncation_mse[..., i].numpy(), cut - full, rtol=1e-3)


def test_a_plane_that_is_not_dropped_has_gain_one_and_no_error() -> None:
    for bits, kept in ((2, 0), (4, 1)):
        e = encode_pages(torch.from_numpy(rows(3, 2, 1, 64)), bits, ScaleRule.UNBIASED, center=True)
        assert (oracle.read_scale16(e.gain.numpy())[..., kept:] == 1).all()
        assert (e.truncation_mse[..., kept:] == 0).all()


@pytest.mark.parametrize("bits", [2, 4])
def test_unbiased_scales_keep_inner_products(bits: int) -> None:
    """<x - mean, x^ - mean> = |x - mean|^2 up to the scale's 16 bits; least squares alone loses 12 % at 2 bits."""
    x = np.random.default_rng(0).standard_normal((2, 2, 64, 128)).astype(np.float32)
    codes, scale, mid = stored(encode_pages(torch.from_numpy(x), bits, ScaleRule.UNBIASED, center=False))
    y = x.astype(np.float64) - x.mean(-1, keepdims=True, dtype=np.float64)
    back = oracle.decode(codes, scale, mid, bits, bits)
    np.testing.assert_allclose((y * back).sum(-1), (y * y).sum(-1), rtol=2.0**-8)
    error = ((x - back) ** 2).mean()
    assert error < {2: 0.15, 4: 0.0145}[bits]


@given(
    seed=st.integers(0, 2**31),
    bits=st.sampled_from([2, 4, 8]),
    rule=st.sampled_from(list(ScaleRule)),
    dim=st.sampled_from([16, 80, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_a_page_does_not_depend_on_its_neighbours(
    seed: int, bits: int, rule: ScaleRule, dim: int, dtype: torch.dtype
) -> None:
    x = torch.from_numpy(rows(seed, 3, 2, dim)).to(dtype).float()
    together = encode_pages(x, bits, rule, center=True, clip_ratio=0.9)
    alone = encode_pages(x[1:2].clone(), bits, rule, center=True, clip_ratio=0.9)
    for name in ("scale", "mid", "gain", "center", "center_scale", "truncation_mse"):
        assert torch.equal(getattr(together, name)[1:2], getattr(alone, name)), name
    for a, b in zip(together.slabs, alone.slabs, strict=True):
        assert torch.equal(a[1:2], b)
