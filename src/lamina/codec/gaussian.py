"""What a codec does to Gaussian rows, which rotated rows nearly are: steps tell variances, bits tell errors."""

from dataclasses import dataclass
from functools import cache

import torch

from lamina.codec.page import TIERS, CodecConfig, decode_center, decode_pages, effective_step, encode_pages
from lamina.codec.rows import ScaleRule

PAGES = 64


@dataclass(frozen=True)
class GaussianRows:
    """Constants of a codec; each a pair for K and V of three numbers, by tier.

    Attributes
    ----------
    variance : tuple
        A row's variance in units of its squared step.
    error : tuple
        Mean squared error of its codes in units of its variance.
    aligned : bool
        Whether codes keep a row's product with itself, so that their error is orthogonal to it.
    """

    variance: tuple[tuple[float, ...], ...]
    error: tuple[tuple[float, ...], ...]
    aligned: bool


@cache
def gaussian_rows(codec: CodecConfig, head_dim: int) -> GaussianRows:
    """Measure the constants on random rows, the same ones every time."""
    rows = torch.randn(
        PAGES, 1, 64, head_dim, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    )  # fmt: skip
    variance, error = [], []
    for center, clip in ((codec.center, codec.clip_k), (False, codec.clip_v)):
        steps, errors = [], []
        for bits in TIERS:
            e = encode_pages(rows, bits, codec.rule, center=center, clip_ratio=clip)
            target = rows
            if e.center is not None and e.center_scale is not None:
                target = rows - decode_center(e.center, e.center_scale)[:, :, None]
            read = decode_pages(e.slabs, e.scale, e.mid, e.gain, bits)
            power = target.square().mean()
            steps.append(float(power / effective_step(e.scale, e.gain, bits, bits).square().mean()))
            errors.append(float((read - target).square().mean() / power))
        variance.append(tuple(steps))
        error.append(tuple(errors))
    return GaussianRows(tuple(variance), tuple(error), codec.rule is ScaleRule.UNBIASED)
