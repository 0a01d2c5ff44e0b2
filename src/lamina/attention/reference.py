"""Attention over pages, one page at a time in plain torch: the oracle that every other path is tested against."""

import torch
from torch import Tensor

from lamina.attention.reading import K, V, noise_factors, read_pages
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
    for b in range(batch):
        last = int(view.lengths[b])
        for i in range(tokens):
            position = last - tokens + i
            rows = _rows(view, basis, b, position, None if chunk is None else last - tokens, dtype)
            if chunk is not None:
                rows.append((False, chunk[0][b, :, : i + 1].to(dtype), chunk[1][b, :, : i + 1].to(dtype), None))
            result = _attend_one(q_bhtd[b, :, i].to(dtype), rows, basis)
            out[b, i], lse_packed[b, :, i], lse[b, :, i] = result
    return AttentionOutput(out.to(q_bhtd.dtype), lse_packed.float(), lse.float()).with_sinks(basis.sinks)


def _rows(
    view: StoreView, basis: ReadBasis, b: int, position: int, limit: int | None, dtype: torch.dtype
) -> list[tuple[bool, Tensor, Tensor, Tensor | None]]:
    """(packed, k, v ``[H, n, D]``, logit noise ``[H, n]``) of every page that a query at ``position`` reads."""
    found: list[tuple[bool, Tensor, Tensor, Tensor | None]] = []
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
            found.append((False, k[:, :n], v[:, :n], None))
        else:
            ids = torch.tensor([page])
            (k, step), (v, _) = read_pages(view, ids, K, dtype), read_pages(view, ids, V, dtype)
            noise = noise_factors(view, ids, basis)[..., None].to(dtype) * step.to(dtype) ** 2
            found.append((True, k[0, :, :n], v[0, :, :n], noise[0, :, :n]))
    return found


def _attend_one(q: Tensor, rows: list, basis: ReadBasis) -> tuple[Tensor, Tensor, Tensor]:
    """One query ``[Hq, D]`` over all rows: output ``[Hq, D]``, log-sum-exp of packed rows and of all, ``[Hq]``."""
    n_kv = basis.mean_v.shape[0]
    dtype = q.dtype
    q = q.unflatten(0, (n_kv, -1)) * basis.scaling
    q_packed = q @ basis.q_forward.to(dtype)
    logits, packed = [], []
    for is_packed, k, _, noise in rows:
        x = (q_packed if is_packed else q) @ k.mT
        if is_packed:
            x = x - q_packed.square().sum(-1, keepdim=True) * noise[:, None] / 2
        if basis.softcap:
            x = basis.softcap * (x / basis.softcap).tanh()
        logits.append(x)
        packed.append(torch.full((x.shape[-1],), is_packed))
    p = torch.cat(logits, -1)
    is_packed = torch.cat(packed)
    lse = p.logsumexp(-1)
    lse_packed = p.masked_fill(~is_packed, NEVER).logsumexp(-1)
    p = (p - lse[..., None]).exp()
    out = torch.zeros_like(q)
    start = 0
    for packed_page, _, v, _ in rows:
        weight = p[..., start : start + v.shape[1]]
        start += v.shape[1]
        if packed_page:
            v = v @ basis.v_forward.to(dtype).mT + basis.mean_v.to(dtype)[:, None]
        out += weight @ v
    return out.flatten(0, 1), lse_packed.flatten(), lse.flatten()
