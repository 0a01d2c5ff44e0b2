"""Attention over pages, one page at a time in plain torch: the oracle that every other path is tested against."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.attention.reading import K, V, noise_factors, page_centers, read_pages, row_variances
from lamina.attention.types import AttentionOutput, ReadBasis
from lamina.pages.table import EXACT, ROWS, START, TIER
from lamina.pages.view import StoreView

NEVER = float("-inf")


def attend_reference(
    q_bhtd: Tensor,
    view: StoreView,
    basis: ReadBasis,
    chunk: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
) -> AttentionOutput:
    """Attend from the last T tokens of each sequence.

    Parameters
    ----------
    q_bhtd : Tensor
        ``[B, Hq, T, D]``, after RoPE.
    view : StoreView
        Pages, the T tokens included.
    basis : ReadBasis
        How packed rows are read.
    chunk : (Tensor, Tensor), optional
        Rows ``[B, H, T, D]`` of these T tokens, attended exactly instead of their stored form.
    dtype : torch.dtype
        Of the computation.
    """
    batch, n_q, tokens, dim = q_bhtd.shape
    out = torch.zeros(batch, tokens, n_q, dim, dtype=dtype)
    lse_packed = torch.full((batch, n_q, tokens), NEVER, dtype=dtype)
    lse = lse_packed.clone()
    spread = torch.zeros(batch, n_q, tokens, 3, dtype=dtype) if basis.rows is not None else None
    for b in range(batch):
        last = int(view.lengths[b])
        for i in range(tokens):
            position = last - tokens + i
            rows = _rows(view, basis, b, position, None if chunk is None else last - tokens, dtype)
            if chunk is not None:
                rows.append(_Rows(chunk[0][b, :, : i + 1].to(dtype), chunk[1][b, :, : i + 1].to(dtype)))
            result = _attend_one(q_bhtd[b, :, i].to(dtype), rows, basis)
            out[b, i], lse_packed[b, :, i], lse[b, :, i] = result[:3]
            if spread is not None:
                spread[b, :, i] = result[3]
    parts = out.to(q_bhtd.dtype), lse_packed.float(), lse.float(), None if spread is None else spread.float()
    return AttentionOutput(*parts).with_sinks(basis.sinks)


@dataclass
class _Rows:
    """Rows ``[H, n, D]`` that a query reads; of packed ones also ``[H, n]`` of what codes do, and the center."""

    k: Tensor
    v: Tensor
    noise: Tensor | None = None
    center: Tensor | None = None
    variance_k: Tensor | None = None
    variance_v: Tensor | None = None

    @property
    def packed(self) -> bool:
        """Whether they are codes."""
        return self.noise is not None


def _rows(
    view: StoreView, basis: ReadBasis, b: int, position: int, limit: int | None, dtype: torch.dtype
) -> list[_Rows]:
    """What a query at ``position`` reads, page by page."""
    found: list[_Rows] = []
    for page in view.page_ids[b].tolist():
        if page < 0:
            continue
        row = view.table[page].tolist()
        end = position + 1 if limit is None else min(limit, position + 1)
        n = min(row[ROWS], end - row[START])
        if n <= 0:
            continue
        in_window = row[START] < view.window.sink or row[START] >= view.window.exact_from(position)
        if row[TIER] == 0 or (in_window and row[EXACT] >= 0):
            k, v = view.exact[row[EXACT]].to(dtype)
            found.append(_Rows(k[:, :n], v[:, :n]))
        else:
            ids = torch.tensor([page])
            (k, step), (v, _) = read_pages(view, ids, K, dtype), read_pages(view, ids, V, dtype)
            noise = noise_factors(view, ids, basis)[..., None].to(dtype) * step.to(dtype) ** 2
            packed = _Rows(k[0, :, :n], v[0, :, :n], noise[0, :, :n], page_centers(view, ids)[0].to(dtype))
            if basis.rows is not None:
                packed.variance_k = row_variances(view, ids, K, basis.rows)[0, :, :n].to(dtype)
                packed.variance_v = row_variances(view, ids, V, basis.rows)[0, :, :n].to(dtype)
            found.append(packed)
    return found


def _attend_one(q: Tensor, rows: list[_Rows], basis: ReadBasis) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One query ``[Hq, D]``: output ``[Hq, D]``, log-sum-exp of packed rows and of all ``[Hq]``, spread ``[Hq, 3]``."""
    n_kv = basis.mean_v.shape[0]
    dtype = q.dtype
    q = q.unflatten(0, (n_kv, -1)) * basis.scaling
    q_packed = q @ basis.q_forward.to(dtype)
    logits, packed = [], []
    for row in rows:
        x = (q_packed if row.packed else q) @ row.k.mT
        if row.noise is not None:
            x = x - q_packed.square().sum(-1, keepdim=True) * row.noise[:, None] / 2
        if basis.softcap:
            x = basis.softcap * (x / basis.softcap).tanh()
        logits.append(x)
        packed.append(torch.full((x.shape[-1],), row.packed))
    p = torch.cat(logits, -1)
    is_packed = torch.cat(packed)
    lse = p.logsumexp(-1)
    lse_packed = p.masked_fill(~is_packed, NEVER).logsumexp(-1)
    p = (p - lse[..., None]).exp()
    out = torch.zeros_like(q)
    spread = q.new_zeros(*q.shape[:2], 3)
    start = 0
    for row, x in zip(rows, logits):
        v = row.v
        weight = p[..., start : start + v.shape[1]]
        start += v.shape[1]
        if row.variance_k is not None and row.variance_v is not None and basis.rows is not None:
            dot = q_packed @ (row.k - row.center[:, None]).mT  # type: ignore[index]
            along = dot**2 / q.shape[-1] if basis.rows.aligned else 0
            w = (row.variance_k[:, None] * q_packed.square().sum(-1, keepdim=True) - along).clamp(min=0)
            if basis.softcap:
                w = w * (1 - (x / basis.softcap) ** 2) ** 2
            terms = weight * w, weight**2 * w, weight**2 * row.variance_v[:, None]
            spread += torch.stack([t.sum(-1) for t in terms], -1)
        if row.packed:
            v = v @ basis.v_back.to(dtype).mT + basis.mean_v.to(dtype)[:, None]
        out += weight @ v
    return out.flatten(0, 1), lse_packed.flatten(), lse.flatten(), spread.flatten(0, 1)
