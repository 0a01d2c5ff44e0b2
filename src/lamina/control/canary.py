"""Canaries: how far a layer's attention would drift at each tier, from a few rows (Lamina SPEC 6). Pure functions."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.codec import TIERS

Quantise = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Rows ``[H, n, D]`` in the packed basis and bits -> the rows as they would be read, and their steps ``[H, n]``."""

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


@dataclass
class Witnesses:
    """Rows that stand for a sequence's packed tokens; n rows, H KV heads.

    Attributes
    ----------
    k, v : Tensor
        ``[H, n, D]``, exact, in the engine's basis.
    k_centred, v_centred : Tensor
        float32 ``[H, n, D]``: the same in the packed basis, K less its page's stored center, V less the mean.
    weight : Tensor
        float32 ``[n]``: packed tokens that each row stands for.
    """

    k: Tensor
    v: Tensor
    k_centred: Tensor
    v_centred: Tensor
    weight: Tensor


def anchored(
    q: Tensor,
    witnesses: Witnesses,
    *,
    q_forward: Tensor,
    scaling: float,
    packed_mass: Tensor,
    out: Tensor,
    quantise_k: Quantise,
    quantise_v: Quantise,
    kappa: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Drift of the real attention output, windows included, that fresh codes of each tier would cause.

    With s_i the exact logits of the witnesses, M the probability mass on packed rows, pi the softmax of s over the
    witnesses (each with its weight) and e_i the change of a logit:
    K: log(1 + M sum pi (exp(e) - 1)) - M sum pi e; V: M^2 sum (pi_i^2 / w_i) |v^_i - v_i|^2 / |o|^2.
    M is the only input that depends on past decisions.

    Parameters
    ----------
    q : Tensor
        ``[Hq, D]``, the newest query, after RoPE.
    witnesses : Witnesses
        Of its sequence.
    q_forward : Tensor
        float32 ``[H, D, D]``: packed keys are read with q @ q_forward.
    scaling : float
        Factor on q.k.
    packed_mass : Tensor
        ``[Hq]``: probability mass that attention put on packed rows, from its two log-sum-exps.
    out : Tensor
        ``[Hq, D]``: the attention output.
    quantise_k, quantise_v : callable
        The storage codec of a row.
    kappa : Tensor, optional
        ``[H, 3]`` by tier: the mass correction's squared error in units of the squared step; None without it.
    softcap : float
        Cap of the logits, 0 for none.

    Returns
    -------
    k, v : dict
        Bits -> float32 ``[Hq]``.
    """
    heads = witnesses.k.shape[0]
    q_h = q.float().unflatten(0, (heads, -1)) * scaling
    q_packed = q_h @ q_forward
    s = _cap(q_h @ witnesses.k.float().mT, softcap)
    log_pi = (s + witnesses.weight.log()).double().log_softmax(-1)
    pi = log_pi.exp()
    mass = packed_mass.double().clamp(0, 1).view(heads, -1)
    energy = q_packed.square().sum(-1, keepdim=True) / 2
    size = out.float().square().sum(-1).view(heads, -1)
    spread = pi.square() / witnesses.weight
    k, v = {}, {}
    for i, bits in enumerate(TIERS):
        rows, step = quantise_k(witnesses.k_centred, bits)
        e = q_packed @ (rows - witnesses.k_centred).mT
        if kappa is not None:
            e = e - energy * (kappa[:, i, None] * step**2)[:, None]
        if softcap:
            e = _cap(q_h @ witnesses.k.float().mT + e, softcap) - s
        # The logarithm of 1 - M + M sum pi exp(e), which no e can overflow.
        change = torch.logaddexp(torch.log1p(-mass), mass.log() + (log_pi + e).logsumexp(-1))
        k[bits] = (change - mass * (pi * e).sum(-1)).clamp(min=0).float().flatten()
        error = (quantise_v(witnesses.v_centred, bits)[0] - witnesses.v_centred).double().square().sum(-1)
        v[bits] = (mass.square() * (spread * error[:, None]).sum(-1) / (size + EPS)).float().flatten()
    return k, v


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


def _cap(x: Tensor, softcap: float) -> Tensor:
    return softcap * (x / softcap).tanh() if softcap else x
