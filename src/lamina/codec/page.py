"""Whole pages <-> codes: page center, embedded codes, planes and truncation gains (Lamina SPEC 4)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.codec.numbers import from_scale16, round_scale16, to_scale16
from lamina.codec.packing import join_planes, split_planes
from lamina.codec.rows import ScaleRule, dequantise_rows, quantise_rows
from lamina.errors import ConfigError

PAGE_TOKENS = 64
TIERS = (2, 4, 8)


@dataclass(frozen=True)
class CodecConfig:
    """How closed pages are written.

    Attributes
    ----------
    rule : ScaleRule
        Scale rule of K and V rows.
    clip_k, clip_v : float
        Clip ratios of the ``clip`` rule, in (0, 1].
    center : bool
        Whether K pages are coded around their own mean, kept in 8 bits.
    mass_correction : bool
        Whether attention corrects packed logits for the mass that their noise adds (Lamina SPEC 5).

    Examples
    --------
    Codes as other caches write them, from the least to the largest number of a row, for a comparison:

    >>> from lamina import CodecConfig
    >>> plain = CodecConfig(rule="minmax", center=False, mass_correction=False)
    >>> plain.rule
    <ScaleRule.MINMAX: 'minmax'>

    A cache takes it as ``LaminaCache(model, profile, codec=plain)``.
    """

    rule: ScaleRule = ScaleRule.UNBIASED
    clip_k: float = 0.96
    clip_v: float = 0.92
    center: bool = True
    mass_correction: bool = True

    def __post_init__(self) -> None:
        """Check every field."""
        object.__setattr__(self, "rule", parse_rule(self.rule))
        for name in ("clip_k", "clip_v"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not a clip ratio; use a number in (0, 1]")


def parse_rule(rule: str) -> ScaleRule:
    """Return the scale rule of that name, or raise ConfigError listing the names."""
    try:
        return ScaleRule(rule)
    except ValueError:
        raise ConfigError(f"unknown scale rule {rule!r}; choose one of {', '.join(ScaleRule)}") from None


def check_tier(bits: int, where: str) -> int:
    """Return ``bits`` if it is a tier, else raise ConfigError."""
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in TIERS:
        raise ConfigError(f"{where} is {bits!r}; a tier is one of {', '.join(map(str, TIERS))} bits")
    return int(bits)


@dataclass
class EncodedPages:
    """N closed pages of one KV side, as they are stored.

    Attributes
    ----------
    bits : int
        Their tier.
    slabs : list of Tensor
        1, 2 or 4 packed slabs, uint8 ``[N, H, 64, D/4]`` (see :mod:`lamina.codec.packing`).
    scale : Tensor
        int16 ``[N, H, 64]`` in ``scale16``.
    mid : Tensor
        bfloat16 ``[N, H, 64]``.
    gain : Tensor
        int16 ``[N, H, 2]`` in ``scale16``: factor on the scale when read at 2 and at 4 bits.
    center, center_scale : Tensor or None
        int8 ``[N, H, D]`` and int16 ``[N, H]`` in ``scale16``; None without page centers.
    truncation_mse : Tensor
        float32 ``[N, H, 2]``: mean squared error per element that reading at 2 and at 4 bits adds (0 where nothing
        is dropped). Used to rank planes for shedding; not part of the page.
    """

    bits: int
    slabs: list[Tensor]
    scale: Tensor
    mid: Tensor
    gain: Tensor
    center: Tensor | None
    center_scale: Tensor | None
    truncation_mse: Tensor


def encode_pages(x: Tensor, bits: int, rule: ScaleRule, *, center: bool, clip_ratio: float = 1.0) -> EncodedPages:
    """Encode whole pages.

    Each page depends on its own rows alone and is the same whatever pages are encoded beside it.

    Parameters
    ----------
    x : Tensor
        float32 (or float64) ``[N, H, 64, D]``, rows in the packed basis; D a multiple of 16.
    bits : int
        Tier: 2, 4 or 8.
    rule, clip_ratio
        See :func:`lamina.codec.rows.quantise_rows`.
    center : bool
        Code rows around the page's mean.

    Raises
    ------
    ConfigError
        If bits is not a tier.
    """
    check_tier(bits, "bits")
    codes_c = scale_c = None
    if center:
        codes_c, scale_c = encode_center(x.mean(2))
        x = x - decode_center(codes_c, scale_c).to(x.dtype)[:, :, None]
    codes, scale, mid = quantise_rows(x, bits, rule, clip_ratio)
    slabs = split_planes(codes, bits)
    gain, truncation = _truncations(x, codes, scale, mid, bits)
    return EncodedPages(
        bits, slabs, to_scale16(scale), mid.to(torch.bfloat16), to_scale16(gain), codes_c, scale_c, truncation
    )


def encode_center(center: Tensor) -> tuple[Tensor, Tensor]:
    """Round page centers ``[N, H, D]`` to int8 with one ``scale16`` a head ``[N, H]``."""
    scale = round_scale16(center.abs().amax(-1) / 127).to(center.dtype)
    ratio = torch.where(scale[..., None] > 0, center / scale[..., None], 0.0)
    return ratio.round().clamp(-127, 127).to(torch.int8), to_scale16(scale)


def decode_center(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode int8 ``[..., D]`` centers with ``scale16`` ``[...]`` to float32."""
    return codes.to(torch.float32) * from_scale16(scale)[..., None]


def decode_pages(
    slabs: list[Tensor], scale: Tensor, mid: Tensor, gain: Tensor, bits: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Decode the codes of pages, without their centers.

    Parameters
    ----------
    slabs : list of Tensor
        The 1, 2 or 4 most significant slabs that are left, uint8 ``[N, H, 64, D/4]``.
    scale, mid, gain : Tensor
        As stored, see :class:`EncodedPages`.
    bits : int
        The tier that the pages were encoded at.
    dtype : torch.dtype
        Of the result.

    Returns
    -------
    Tensor
        ``[N, H, 64, D]`` of ``dtype``.
    """
    read = {1: 2, 2: 4, 4: 8}[len(slabs)]
    step = effective_step(scale, gain, bits, read).to(dtype)
    return dequantise_rows(join_planes(slabs), step, mid.to(dtype), read)


def effective_step(scale: Tensor, gain: Tensor, bits: int, read: int) -> Tensor:
    """Distance between neighbouring codes, float32 ``[N, H, 64]``, of a tier-``bits`` page read at ``read`` bits."""
    step = from_scale16(scale)
    if read == bits:
        return step
    return step * (from_scale16(gain[..., TIERS.index(read)])[..., None] * 2 ** (bits - read))


def _truncations(x: Tensor, codes: Tensor, scale: Tensor, mid: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Unbiased gain and added error of reading at 2 and 4 bits: two ``[N, H, 2]`` tensors."""
    gain = x.new_ones(*x.shape[:2], 2)
    error = x.new_zeros(*x.shape[:2], 2)
    if bits == 2:
        return gain, error.float()
    y = x - x.mean(-1, keepdim=True)
    full_error = (x - dequantise_rows(codes, scale, mid, bits)).square().mean((-1, -2))
    for i, read in enumerate(TIERS[: TIERS.index(bits)]):
        top = (codes >> (bits - read)).to(x.dtype)
        step = (scale * 2 ** (bits - read))[..., None]
        dot = (y * (top - top.mean(-1, keepdim=True)) * step).sum((-1, -2))
        raw = torch.where(dot > 0, y.square().sum((-1, -2)) / dot, 1.0).clamp(1 / 2, 2)
        gain[..., i] = round_scale16(raw).to(x.dtype)
        value = mid[..., None] + step * gain[..., i, None, None] * (top - (2**read - 1) / 2)
        error[..., i] = ((x - value).square().mean((-1, -2)) - full_error).clamp(min=0)
    return gain, error.float()
