"""How far packed reads move a layer's attention: the truth that canaries and calibration are judged by."""

import torch
from torch import Tensor

from lamina.attention.reading import K, noise_factors, read_pages
from lamina.attention.types import ReadBasis
from lamina.pages.table import EXACT, ROWS, START, TIER
from lamina.pages.view import StoreView


def attention_drift(q_htd: Tensor, k_htd: Tensor, view: StoreView, basis: ReadBasis) -> Tensor:
    """KL divergence from exact attention of the distributions that packed reads give.

    Parameters
    ----------
    q_htd : Tensor
        ``[Hq, n, D]``, queries of the last n tokens.
    k_htd : Tensor
        ``[H, T, D]``, exact keys of all tokens.
    view : StoreView
        Their pages; the first sequence is read.
    basis : ReadBasis
        How packed rows are read.

    Returns
    -------
    Tensor
        float64 ``[Hq, n]``, in nats.
    """
    n_kv, length, _ = k_htd.shape
    n = q_htd.shape[1]
    q = q_htd.double().unflatten(0, (n_kv, -1)) * basis.scaling
    position = torch.arange(length - n, length)[:, None]
    exact = q @ k_htd.double()[:, None].mT
    ids = view.page_ids[0].long()
    table = view.table[ids].long()
    packed = _packed_logits(q, view, ids[table[:, TIER] > 0], basis)
    page_of = torch.repeat_interleave(torch.arange(len(ids)), table[:, ROWS])
    start = table[page_of, START]
    recent = position // 64 * 64 - view.window.recent
    in_window = (start < view.window.sink) | (start >= recent)
    exactly = (table[page_of, TIER] == 0) | (in_window & (table[page_of, EXACT] >= 0))
    packed = torch.nn.functional.pad(packed, (0, length - packed.shape[-1]))
    seen = torch.arange(length) <= position
    log_p = exact.masked_fill(~seen, float("-inf")).log_softmax(-1)
    log_q = torch.where(exactly, exact, packed).masked_fill(~seen, float("-inf")).log_softmax(-1)
    kl = torch.where(seen, log_p.exp() * (log_p - log_q), 0.0).sum(-1)
    return kl.flatten(0, 1)


def _packed_logits(q: Tensor, view: StoreView, ids: Tensor, basis: ReadBasis) -> Tensor:
    """Logits of all closed pages as read from their planes, ``[H, g, n, 64 * pages]``."""
    q_packed = q @ basis.q_forward.double()[:, None]
    k, step = read_pages(view, ids, K, torch.float64)
    noise = noise_factors(view, ids, basis)[..., None].double() * step.double() ** 2
    logits = q_packed @ k.transpose(0, 1).flatten(1, 2)[:, None].mT
    energy = q_packed.square().sum(-1, keepdim=True) / 2
    return logits - energy * noise.transpose(0, 1).flatten(1, 2)[:, None, None]
