"""Reading stored pages, whole and with dropped planes; settings and their errors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from lamina.codec import CodecConfig, ScaleRule, decode_pages, encode_pages
from lamina.codec.page import decode_center, effective_step
from lamina.errors import ConfigError, LaminaError

SLABS = {2: 1, 4: 2, 8: 4}


@given(
    seed=st.integers(0, 2**31),
    tiers=st.sampled_from([(2, 2), (4, 4), (4, 2), (8, 8), (8, 4), (8, 2)]),
    rule=st.sampled_from(list(ScaleRule)),
    dim=st.sampled_from([16, 64, 112, 192]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_decoding_equals_the_oracle(
    seed: int, tiers: tuple[int, int], rule: ScaleRule, dim: int, dtype: torch.dtype
) -> None:
    bits, read = tiers
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((2, 2, 64, dim))).float()
    e = encode_pages(x, bits, rule, center=True)
    slabs = e.slabs[: SLABS[read]]
    scale, mid = oracle.read_scale16(e.scale.numpy()), oracle.read_bf16(e.mid.view(torch.int16).numpy())
    gain = 1.0 if read == bits else oracle.read_scale16(e.gain.numpy())[..., (2, 4).index(read), None]
    expected = oracle.decode(oracle.unpack([s.numpy() for s in slabs]), scale, mid, bits, read, gain)
    ours = decode_pages(slabs, e.scale, e.mid, e.gain, bits, dtype)
    assert ours.dtype == dtype
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-6, atol=1e-6 * abs(expected).max())
    step = effective_step(e.scale, e.gain, bits, read)
    np.testing.assert_allclose(step.numpy(), scale * gain * 2 ** (bits - read), rtol=1e-7)


def test_a_center_decodes_to_the_pages_mean() -> None:
    x = torch.randn(3, 2, 64, 80, generator=torch.Generator().manual_seed(0)) + 5
    e = encode_pages(x, 2, ScaleRule.UNBIASED, center=True)
    assert e.center is not None and e.center_scale is not None
    center = decode_center(e.center, e.center_scale)
    half_a_step = oracle.read_scale16(e.center_scale.numpy())[..., None] / 2
    # the largest channel may be clamped by the rounding of the scale itself, half of 2^-8
    assert (abs(center.numpy() - x.mean(2).numpy()) <= half_a_step * 1.01 + abs(x.mean(2).numpy()) * 2.0**-9).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_reconstruction_error_of_gaussian_rows(bits: int) -> None:
    """SPEC 4: 0.128 sigma^2 of a page quantised at 2 bits, 0.156 of one read from the top bits of more."""
    x = torch.randn(8, 2, 64, 128, generator=torch.Generator().manual_seed(0))
    e = encode_pages(x, bits, ScaleRule.UNBIASED, center=False)
    for read in (r for r in (2, 4, 8) if r <= bits):
        error = float((decode_pages(e.slabs[: SLABS[read]], e.scale, e.mid, e.gain, bits) - x).square().mean())
        expected = {(2, 2): 0.13, (4, 4): 0.013, (8, 8): 4e-5}.get((bits, read), {2: 0.2, 4: 0.018}.get(read, 0))
        assert expected * 0.5 < error < expected * 1.2, (bits, read, error)


def test_settings_are_checked() -> None:
    assert CodecConfig(rule="clip").rule is ScaleRule.CLIP  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"unknown scale rule 'nope'.*minmax, clip, unbiased"):
        CodecConfig(rule="nope")  # type: ignore[arg-type]
    for name in ("clip_k", "clip_v"):
        for value in (0, -1, 1.5):
            with pytest.raises(ConfigError, match=f"{name}={value} is not a clip ratio"):
                CodecConfig(**{name: value})
    for bits in (0, 3, 16):
        with pytest.raises(ConfigError, match="a tier is one of 2, 4, 8 bits"):
            encode_pages(torch.zeros(1, 1, 64, 16), bits, ScaleRule.MINMAX, center=False)
    assert issubclass(ConfigError, LaminaError) and issubclass(ConfigError, ValueError)
