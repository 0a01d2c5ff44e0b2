"""Canaries: how far a layer's attention would drift at each tier (Lamina SPEC 6). Pure functions."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.codec import TIERS
from lamina.codec.gaussian import GaussianRows

EPS = 1e-12


@dataclass(frozen=True)
class Signals:
    """Predicted drift of one layer by tier, averaged over query heads and sequences, in nats and as a relative error.

    Attributes
    ----------
    k, v : dict
        Bits (2, 4, 8) -> signal.
    """

    k: dict[int, float]
    v: dict[int, float]


def anchored(spread: Tensor, out: Tensor, rows: GaussianRows) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Drift of the real attention, windows included, that fresh codes of each tier would cause.

    To second order in the errors, which are taken to be independent between rows: for K the KL of the distribution,
    half the variance of the logits' errors under it; for V the squared error of the output. Attention itself sums up
    how its mass lies on the packed rows (``spread``), so every row counts and nothing is kept for it. Only the
    probabilities depend on the tiers that rows are stored at.

    Parameters
    ----------
    spread : Tensor
        ``[..., Hq, 3]``, of the newest query: :attr:`lamina.attention.types.AttentionOutput.spread`.
    out : Tensor
        ``[..., Hq, D]``: the attention output.
    rows : GaussianRows
        Errors of the codec by tier.

    Returns
    -------
    k, v : dict
        Bits -> float32 ``[..., Hq]``, in nats and relative.
    """
    of_k, of_v = (spread[..., 0] - spread[..., 1]).clamp(min=0) / 2, spread[..., 2] * out.shape[-1]
    size = out.float().square().sum(-1) + EPS
    return (
        {bits: rows.error[0][i] * of_k for i, bits in enumerate(TIERS)},
        {bits: rows.error[1][i] * of_v / size for i, bits in enumerate(TIERS)},
    )


def anchored_mean(query: Tensor, out: Tensor, spread: Tensor, lse_packed: Tensor, rows: GaussianRows) -> Tensor:
    """:func:`anchored` averaged over heads and the sequences that have something to say, without waiting for a GPU.

    Parameters
    ----------
    query, out : Tensor
        ``[..., B, Hq, D]``, of the newest tokens; queries of padding are zero.
    spread, lse_packed : Tensor
        ``[..., B, Hq, 3]`` and ``[..., B, Hq]``, see :class:`lamina.attention.types.AttentionOutput`.
    rows : GaussianRows
        Errors of the codec by tier.

    Returns
    -------
    Tensor
        float32 ``[..., 2, 3]``: K and V by tier; NaN if no sequence has packed rows.
    """
    sides = anchored(spread, out, rows)
    found = torch.stack([torch.stack([side[bits] for bits in TIERS], -1) for side in sides], -2).mean(-3)
    counts = (lse_packed > float("-inf")).any(-1) & query.any(-1).any(-1) & found.isfinite().all(-1).all(-1)
    return torch.where(counts[..., None, None], found, 0.0).sum(-3) / counts.sum(-1)[..., None, None]


def ring(q: Tensor, keys: Tensor, *, scaling: float, quantise: Callable[[Tensor, int], Tensor]) -> dict[int, Tensor]:
    """EchoKV's canary: KL(softmax(q K') || softmax(q quant_b(K)')) over the last keys of a sequence.

    Parameters
    ----------
    q : Tensor
        ``[Hq, D]``, the newest query, after RoPE.
    keys : Tensor
        ``[H, n, D]``, the last n keys, exact.
    scaling : float
        Factor on q.k.
    quantise : callable
        Rows ``[H, n, D]`` in the engine's basis and bits -> the rows as the storage codec returns them.

    Returns
    -------
    dict
        Bits -> float32 ``[Hq]``, in nats.
    """
    q_h = q.float().unflatten(0, (keys.shape[0], -1)) * scaling
    log_p = (q_h @ keys.float().mT).log_softmax(-1)
    found = {}
    for bits in TIERS:
        log_q = (q_h @ quantise(keys.float(), bits).mT).log_softmax(-1)
        found[bits] = (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0).flatten()
    return found
