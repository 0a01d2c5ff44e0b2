"""What attention is given and what it returns."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.codec.gaussian import GaussianRows


@dataclass
class ReadBasis:
    """How packed rows of one layer are read; H counts KV heads.

    Attributes
    ----------
    q_forward : Tensor
        float32 ``[H, D, D]``: packed keys are read with q @ q_forward.
    v_back : Tensor
        float32 ``[H, D, D]``: packed output o' becomes o' @ v_back' + (packed mass) mean_v.
    mean_v : Tensor
        float32 ``[H, D]``.
    kappa : Tensor
        float32 ``[H, 3, 3]``, by tier and bits read; 0 switches the mass correction off.
    scaling : float
        Factor on q.k.
    softcap : float
        c of the logits' cap, c tanh(x / c); 0 means none. The mass correction is taken off before the cap.
    sinks : Tensor or None
        float32 ``[Hq]``: logits that take part in the softmax without a value.
    rows : GaussianRows or None
        What the codec does to rows, if :attr:`AttentionOutput.spread` is wanted.
    """

    q_forward: Tensor
    v_back: Tensor
    mean_v: Tensor
    kappa: Tensor
    scaling: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    rows: GaussianRows | None = None


@dataclass
class AttentionOutput:
    """Result of attention over pages.

    Attributes
    ----------
    out : Tensor
        ``[B, T, Hq, D]`` in q's dtype.
    lse_packed, lse : Tensor
        float32 ``[B, Hq, T]``: log-sum-exp of the logits of the packed rows (-inf without any) and of all rows, sink
        logits included.
    spread : Tensor or None
        float32 ``[B, Hq, T, 3]``, if it was asked for: what errors of packed rows act on. With p the probability of a
        row, a and b the variances of its channels in K and V as its stored steps tell them, q' the query in the packed
        basis times the scaling, x its product with the row less the page's center: the sums over packed rows of p w,
        p^2 w and p^2 b. Here w = a |q'|^2 - x^2 / D, times (1 - (y / c)^2)^2 for a logit y capped at c: the variance
        of a logit whose row errs by a in every channel, though not along itself where codes see to that.
    """

    out: Tensor
    lse_packed: Tensor
    lse: Tensor
    spread: Tensor | None = None

    def with_sinks(self, sinks: Tensor | None) -> "AttentionOutput":
        """The result when logits ``[Hq]`` without a value join the softmax."""
        if sinks is None:
            return self
        extra = sinks.float()[None, :, None].to(self.lse.device)
        share = (self.lse - extra).sigmoid()
        out = (self.out * share.mT[..., None]).to(self.out.dtype)
        spread = self.spread
        if spread is not None:
            spread = spread * torch.stack([share, share**2, share**2], -1)
        return AttentionOutput(out, self.lse_packed, self.lse.logaddexp(extra), spread)
