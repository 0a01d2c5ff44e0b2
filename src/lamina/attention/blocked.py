"""Attention for many queries at once, in torch on any device: pages are decoded a block at a time.

The prefix never exists in full precision: one block of pages is decoded, used and dropped, and the partial results are
merged by their log-sum-exp. The rows of the chunk itself are attended exactly (Lamina SPEC 5, prefill).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.attention.reading import K, V, noise_factors, page_centers, read_pages, row_variances
from lamina.attention.types import AttentionOutput, ReadBasis
from lamina.codec import PAGE_TOKENS
from lamina.pages.table import EXACT, ROWS, START, TIER
from lamina.pages.view import StoreView

BLOCK_PAGES = 16
TILE_QUERIES = 128
NEVER = float("-inf")


@dataclass
class _Spread:
    """Of packed rows: page centers ``[H, n / 64, D]``, variances ``[H, n]``, and 1/D if errors avoid the row itself."""

    centers: Tensor
    variance_k: Tensor
    variance_v: Tensor
    along: float


class _Partial:
    """Running softmax: maximum, mass, weighted values and spread of the rows seen so far."""

    def __init__(self, shape: tuple[int, ...], dim: int, device: torch.device, softcap: float) -> None:
        self.softcap = softcap
        self.peak = torch.full(shape, NEVER, device=device)
        self.mass = torch.zeros(shape, device=device)
        self.acc = torch.zeros(*shape, dim, device=device)
        self.spread = torch.zeros(*shape, 3, device=device)

    def add(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, noise: Tensor | None = None, spread: _Spread | None = None
    ) -> None:
        """Add rows k, v ``[H, n, D]`` for the queries q ``[H, g, T, D]`` that see them (bool ``[T, n]``).

        ``noise`` ``[H, n]``, times half of a query's energy, is taken off the logits. Queries are taken a tile at a
        time, which bounds the scratch memory.
        """
        for at in torch.arange(q.shape[2], device=q.device).split(TILE_QUERIES):
            tile = slice(int(at[0]), int(at[-1]) + 1)
            if not bool(seen[tile].any()):
                continue
            x = q[:, :, tile]
            logits = (x.flatten(1, 2) @ k.mT).view(*x.shape[:3], -1)
            if spread is not None:
                center = (x.flatten(1, 2) @ spread.centers.mT).view(*x.shape[:3], -1).repeat_interleave(PAGE_TOKENS, -1)
                energy = x.square().sum(-1, keepdim=True)
                w = (spread.variance_k[:, None, None] * energy - (logits - center) ** 2 * spread.along).clamp_(min=0)
            if noise is not None:
                logits -= x.square().sum(-1, keepdim=True) / 2 * noise[:, None, None]
            if self.softcap:
                logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
                if spread is not None:
                    w *= (1 - (logits / self.softcap) ** 2) ** 2
            logits.masked_fill_(~seen[tile], NEVER)
            peak = torch.maximum(self.peak[:, :, tile], logits.amax(-1))
            safe = torch.where(peak == NEVER, 0.0, peak)
            keep = (self.peak[:, :, tile] - safe).exp()
            p = logits.sub_(safe[..., None]).exp_()
            self.mass[:, :, tile] = self.mass[:, :, tile] * keep + p.sum(-1)
            weighted = (p.flatten(1, 2) @ v).view(*x.shape)
            if spread is not None:
                sums = (p * w).sum(-1), (p**2 * w).sum(-1), (p**2 * spread.variance_v[:, None, None]).sum(-1)
                factors = torch.stack([keep, keep**2, keep**2], -1)
                self.spread[:, :, tile] = self.spread[:, :, tile] * factors + torch.stack(sums, -1)
            self.acc[:, :, tile] = self.acc[:, :, tile] * keep[..., None] + weighted
            self.peak[:, :, tile] = peak

    def lse(self) -> Tensor:
        """Log-sum-exp ``[H, g, T]``."""
        return self.peak + self.mass.log()


def attend_blocked(q_bhtd: Tensor, view: StoreView, basis: ReadBasis, chunk: tuple[Tensor, Tensor]) -> AttentionOutput:
    """Attend from the last T tokens of each sequence, in float32.

    Parameters
    ----------
    q_bhtd : Tensor
        ``[B, Hq, T, D]``, after RoPE.
    view : StoreView
        Pages, the T tokens included.
    basis : ReadBasis
        How packed rows are read.
    chunk : (Tensor, Tensor)
        Rows ``[B, H, T, D]`` of these T tokens.
    """
    batch, n_q, tokens, dim = q_bhtd.shape
    out = torch.empty(batch, tokens, n_q, dim, dtype=q_bhtd.dtype, device=q_bhtd.device)
    lse_packed = torch.empty(batch, n_q, tokens, device=q_bhtd.device)
    lse = torch.empty_like(lse_packed)
    spread = None if basis.rows is None else torch.empty(*lse.shape, 3, device=q_bhtd.device)
    for b in range(batch):
        o, lp, la, found = _attend_sequence(q_bhtd[b], view, b, basis, chunk[0][b], chunk[1][b])
        out[b], lse_packed[b], lse[b] = o.permute(2, 0, 1, 3).flatten(1, 2), lp.flatten(0, 1), la.flatten(0, 1)
        if spread is not None:
            spread[b] = found.flatten(0, 1)
    return AttentionOutput(out, lse_packed, lse, spread)


def _attend_sequence(
    q_htd: Tensor, view: StoreView, b: int, basis: ReadBasis, k_chunk: Tensor, v_chunk: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n_kv, dim = basis.mean_v.shape
    device = q_htd.device
    tokens = q_htd.shape[1]
    before = int(view.lengths[b]) - tokens
    positions = torch.arange(before, before + tokens, device=device)
    q = q_htd.float().unflatten(0, (n_kv, -1)) * basis.scaling
    q_packed = (q.flatten(1, 2) @ basis.q_forward).view_as(q)
    exact, packed = (_Partial(q.shape[:3], dim, device, basis.softcap) for _ in range(2))

    ids = view.page_ids[b]
    ids = ids[ids >= 0].long()
    table = view.table[ids].to(device)
    stored = (before - table[:, START]).clamp(0, PAGE_TOKENS).minimum(table[:, ROWS])
    # [T, pages]: which queries read a page exactly.
    recent = positions // PAGE_TOKENS * PAGE_TOKENS - view.window.recent
    in_window = (table[:, START] < view.window.sink) | (table[:, START] >= recent[:, None])
    exactly = (table[:, TIER] == 0) | (in_window & (table[:, EXACT] >= 0))
    row = torch.arange(PAGE_TOKENS, device=device)
    for sel in _blocks(exactly.any(0) & (stored > 0)):
        rows = view.exact[table[sel, EXACT].long()].permute(1, 2, 0, 3, 4).flatten(2, 3).float()
        written = row < stored[sel, None]
        seen = (exactly[:, sel, None] & written).flatten(1)
        # Rows that were never written may hold NaN, which a weight of zero does not hide.
        exact.add(q, rows[0], rows[1].masked_fill(~written.flatten()[:, None], 0), seen)
    for sel in _blocks(~exactly.all(0) & (stored > 0)):
        at = ids[sel.cpu()].to(device)
        k, step = read_pages(view, at, K)
        v, _ = read_pages(view, at, V)
        noise = noise_factors(view, at, basis)[..., None].to(device) * step**2
        seen = (~exactly[:, sel, None] & (row < stored[sel, None])).flatten(1)
        flat = [x.transpose(0, 1).flatten(1, 2) for x in (k, v, noise)]
        packed.add(q_packed, flat[0], flat[1], seen, flat[2], _spread_of(view, at, basis))
    block = BLOCK_PAGES * PAGE_TOKENS
    for start in range(0, tokens, block):
        k, v = k_chunk[:, start : start + block].float(), v_chunk[:, start : start + block].float()
        keys = torch.arange(start, start + k.shape[1], device=device)
        exact.add(q, k, v, keys <= torch.arange(tokens, device=device)[:, None])
    return _merge(exact, packed, basis)


def _spread_of(view: StoreView, ids: Tensor, basis: ReadBasis) -> _Spread | None:
    if basis.rows is None:
        return None
    a, b = (row_variances(view, ids, side, basis.rows).transpose(0, 1).flatten(1, 2) for side in (K, V))
    along = 1 / view.layout.head_dim if basis.rows.aligned else 0.0
    return _Spread(page_centers(view, ids).transpose(0, 1), a, b, along)


def _blocks(mask: Tensor) -> Iterator[Tensor]:
    """Indices of set entries, a block of pages at a time."""
    return iter(mask.nonzero()[:, 0].split(BLOCK_PAGES)) if bool(mask.any()) else iter(())


def _merge(exact: _Partial, packed: _Partial, basis: ReadBasis) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merge exact and packed parts: output ``[H, g, T, D]`` in the engine's basis, two log-sum-exps, the spread."""
    lse_packed = packed.lse()
    lse = torch.logaddexp(exact.lse(), lse_packed)
    weight_exact = (exact.peak - lse).exp()[..., None]
    weight_packed = torch.where(packed.peak == NEVER, 0.0, (packed.peak - lse).exp())[..., None]
    turned = (packed.acc.flatten(1, 2) @ basis.v_back.mT).view_as(packed.acc)
    centred = packed.mass[..., None] * basis.mean_v[:, None, None]
    out = exact.acc * weight_exact + (turned + centred) * weight_packed
    spread = packed.spread * torch.cat([weight_packed, weight_packed**2, weight_packed**2], -1)
    return out, lse_packed, lse, spread
