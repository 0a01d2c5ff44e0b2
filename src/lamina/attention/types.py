"""What attention is given and what it returns."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class ReadBasis:
    """How packed rows of one layer are read; H counts KV heads.

    Attributes
    ----------
    q_forward : Tensor
        float32 ``[H, D, D]``: packed keys are read with q @ q_forward.
    v_forward : Tensor
        float32 ``[H, D, D]``, orthogonal: packed output o' becomes o' @ v_forward' + (packed mass) mean_v.
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
    """

    q_forward: Tensor
    v_forward: Tensor
    mean_v: Tensor
    kappa: Tensor
    scaling: float
    softcap: float = 0.0
    sinks: Tensor | None = None


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
    """

    out: Tensor
    lse_packed: Tensor
    lse: Tensor

    def with_sinks(self, sinks: Tensor | None) -> "AttentionOutput":
        """The result when logits ``[Hq]`` without a value join the softmax."""
        if sinks is None:
            return self
        extra = sinks.float()[None, :, None].to(self.lse.device)
        share = (self.lse - extra).sigmoid().mT[..., None]
        return AttentionOutput((self.out * share).to(self.out.dtype), self.lse_packed, self.lse.logaddexp(extra))
