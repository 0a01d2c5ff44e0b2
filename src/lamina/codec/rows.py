"""Scale rules: one row of D numbers -> unsigned codes, one scale and one midpoint.

A row decodes as ``mid + scale * (code - (2**bits - 1) / 2)``. This is the linear decode ``zero + scale * code`` with
the offset stored at the middle of the grid instead of its end: the midpoint is small next to the row's spread, so its
16 bits cost nothing even at 8 bits, and dropping low bits only multiplies the scale.
"""

from enum import StrEnum

import torch
from torch import Tensor

from lamina.codec.numbers import round_bf16, round_scale16

GAUSSIAN_STEP = 0.9957
"""Step of the best uniform 2-bit quantiser of a unit Gaussian (Lamina SPEC 4)."""

REFIT_ROUNDS = 2
MAX_RESCALE = 2.0


class ScaleRule(StrEnum):
    """How a row's scale is chosen.

    ``minmax``: the grid spans the row. ``clip``: the same after clamping ``|x|`` at an order statistic of the row
    (OSCAR; 2 bits only, other tiers use ``minmax``). ``unbiased``: a start (the Gaussian step at 2 bits, the row's span
    at 4, where it has a quarter less error than the Gaussian step), least-squares refits, then the scale that keeps
    inner products in expectation (Lamina SPEC 4; 8 bits use ``minmax``, whose bias is below its rounding).
    """

    MINMAX = "minmax"
    CLIP = "clip"
    UNBIASED = "unbiased"


def quantise_rows(x: Tensor, bits: int, rule: ScaleRule, clip_ratio: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise rows.

    Parameters
    ----------
    x : Tensor
        float32 or float64 ``[..., D]``, finite.
    bits : int
        2, 4 or 8.
    rule : ScaleRule
        The scale rule.
    clip_ratio : float
        For ``clip``: ``|x|`` is clamped at its ``floor(clip_ratio * D)``-th smallest value (counted from 0).

    Returns
    -------
    codes, scale, mid : Tensor
        uint8 ``[..., D]``; ``[...]`` in x's dtype, exactly representable in ``scale16`` and bfloat16.
    """
    if rule is ScaleRule.UNBIASED and bits < 8:
        return _unbiased(x, bits)
    if rule is ScaleRule.CLIP and bits == 2:
        index = min(int(clip_ratio * x.shape[-1]), x.shape[-1] - 1)
        limit = x.abs().sort(dim=-1).values[..., index : index + 1]
        x = x.clamp(-limit, limit)
    return _minmax(x, bits)


def dequantise_rows(codes: Tensor, scale: Tensor, mid: Tensor, bits: int) -> Tensor:
    """Decode: uint8 ``[..., D]``, ``[...]``, ``[...]`` -> ``[..., D]`` in scale's dtype."""
    return mid[..., None] + scale[..., None] * (codes.to(scale.dtype) - (2**bits - 1) / 2)


def _minmax(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    low, high = x.amin(-1), x.amax(-1)
    scale = round_scale16((high - low) / (2**bits - 1)).to(x.dtype)
    mid = round_bf16(low + (high - low) / 2).to(x.dtype)
    return _assign(x - mid[..., None], scale, (2**bits - 1) / 2, bits), scale, mid


def _unbiased(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    half = (2**bits - 1) / 2
    mean = x.mean(-1)
    y = x - mean[..., None]
    energy = (y * y).sum(-1)
    if bits == 2:
        codes = _assign(y, GAUSSIAN_STEP * (energy / x.shape[-1]).sqrt(), half, bits)
    else:
        codes = _minmax(x, bits)[0]
    for _ in range(REFIT_ROUNDS):
        offset, dot, norm = _fit(codes, y)
        codes = _assign(y, _ratio(dot, norm), offset, bits)
    offset, dot, norm = _fit(codes, y)
    fitted = _ratio(dot, norm)
    scale = torch.minimum(torch.maximum(_ratio(energy, dot), fitted / MAX_RESCALE), fitted * MAX_RESCALE)
    scale = round_scale16(scale).to(x.dtype)
    mid = round_bf16(mean + scale * (half - offset)).to(x.dtype)
    return codes, scale, mid


def _fit(codes: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean code, and the two inner products of the least-squares slope of y on the centred codes."""
    c = codes.to(y.dtype)
    offset = c.mean(-1)
    c = c - offset[..., None]
    return offset, (y * c).sum(-1), (c * c).sum(-1)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b > 0, a / b, 0.0)


def _assign(y: Tensor, step: Tensor, offset: Tensor | float, bits: int) -> Tensor:
    offset = offset[..., None] if isinstance(offset, Tensor) else offset
    grid = torch.where(step[..., None] > 0, y / step[..., None], 0.0) + (offset + 0.5)
    return grid.floor().clamp(0, 2**bits - 1).to(torch.uint8)
