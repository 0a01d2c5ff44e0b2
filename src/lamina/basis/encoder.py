"""Encoder of one layer: engine rows -> packed basis -> stored codes."""

import dataclasses

import torch
from torch import Tensor

from lamina.basis.profile import LayerProfile
from lamina.codec import TIERS, CodecConfig, EncodedPages, decode_pages, encode_pages
from lamina.codec.page import decode_center, effective_step, encode_center
from lamina.codec.rows import dequantise_rows, quantise_rows


class PageEncoder:
    """Transforms and encodes closed pages of one layer.

    Parameters
    ----------
    profile : LayerProfile
        Bases of the layer.
    codec : CodecConfig
        Scale rule and centers.
    scaling : float
        Factor on q.k in the model's logits.
    device : torch.device
        Where the pages live.
    """

    def __init__(self, profile: LayerProfile, codec: CodecConfig, scaling: float, device: torch.device | str) -> None:
        self.codec = codec
        self.scaling = scaling
        self.k_forward, self.q_forward, self.v_forward, self.v_back, self.mean_v = (
            getattr(profile.stored, f.name).to(device) for f in dataclasses.fields(profile.stored)
        )
        self.kappa = profile.kappa.to(device) if codec.mass_correction else torch.zeros_like(profile.kappa).to(device)
        self.logit_weight = (scaling**2 * profile.q_energy / 2).to(device)
        self.value_weight = (self.v_forward.shape[-1] / profile.v_energy.clamp(min=1e-30)).to(device)

    def encode(self, k_nhtd: Tensor, v_nhtd: Tensor, bits_k: int, bits_v: int) -> tuple[EncodedPages, EncodedPages]:
        """Encode N whole pages of engine rows, two ``[N, H, 64, D]`` of any float dtype.

        Products are taken page by page, so that a page's bytes never depend on what is encoded beside it.
        """
        k = torch.stack([page.float() @ self.k_forward for page in k_nhtd])
        v = torch.stack([(page.float() - self.mean_v[:, None]) @ self.v_forward for page in v_nhtd])
        c = self.codec
        return (
            encode_pages(k, bits_k, c.rule, center=c.center, clip_ratio=c.clip_k),
            encode_pages(v, bits_v, c.rule, center=False, clip_ratio=c.clip_v),
        )

    def requantise_page(self, k: Tensor, bits: int) -> Tensor:
        """Engine rows of K ``[H, n, D]`` as a page of their own would return them, in the engine's basis."""
        packed = k.float() @ self.k_forward
        center = packed.new_zeros(packed.shape[0], 1, packed.shape[-1])
        if self.codec.center:
            center = decode_center(*encode_center(packed.mean(1)))[:, None]
        codes, scale, mid = quantise_rows(packed - center, bits, self.codec.rule, self.codec.clip_k)
        return (dequantise_rows(codes, scale, mid, bits) + center) @ self.q_forward.mT

    def shed_loss(self, truncation_k: Tensor, truncation_v: Tensor) -> Tensor:
        """Predicted loss of reading a page at 2 and at 4 bits, float32 ``[N, 2 sides, 2]``, averaged over heads.

        For K half the variance that the dropped bits add to a logit, for V the error relative to the rows' energy.
        What they add to an element is given, see :attr:`EncodedPages.truncation_mse`.
        """
        loss_k = (truncation_k * self.logit_weight[:, None]).mean(1)
        loss_v = (truncation_v * self.value_weight[:, None]).mean(1)
        return torch.stack([loss_k, loss_v], 1)


def measure_kappa(rows: Tensor, codec: CodecConfig) -> Tensor:
    """Mean squared error of K codes in units of their squared step (Lamina SPEC 5, mass correction).

    Parameters
    ----------
    rows : Tensor
        float32 ``[N, H, 64, D]``, pages of k in the packed basis.
    codec : CodecConfig
        How they are coded.

    Returns
    -------
    Tensor
        float32 ``[H, 3, 3]``, by tier and by bits read; 0 where more bits are read than the tier has.
    """
    kappa = torch.zeros(rows.shape[1], 3, 3)
    for i, bits in enumerate(TIERS):
        e = encode_pages(rows, bits, codec.rule, center=codec.center, clip_ratio=codec.clip_k)
        target = rows
        if e.center is not None and e.center_scale is not None:
            target = rows - decode_center(e.center, e.center_scale)[:, :, None]
        for j, read in enumerate(TIERS[: i + 1]):
            step = effective_step(e.scale, e.gain, bits, read)
            error = (target - decode_pages(e.slabs[: (1, 2, 4)[j]], e.scale, e.mid, e.gain, bits)).square().mean(-1)
            kappa[:, i, j] = error.sum((0, 2)) / step.square().sum((0, 2)).clamp(min=1e-30)
    return kappa
