"""Stored pages -> rows in the packed basis, in plain torch."""

import torch
from torch import Tensor

from lamina.attention.types import ReadBasis
from lamina.codec import TIERS, decode_pages
from lamina.codec.gaussian import GaussianRows
from lamina.codec.numbers import from_scale16
from lamina.codec.packing import SLABS_OF_BITS
from lamina.codec.page import decode_center, effective_step
from lamina.pages.table import FINE, FINEST, TIER, read_bits
from lamina.pages.view import StoreView

K, V = 0, 1


def read_pages(view: StoreView, ids: Tensor, side: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Decode closed pages.

    Parameters
    ----------
    view : StoreView
        Where they are.
    ids : Tensor
        int64 ``[N]`` page ids, any mix of tiers.
    side : int
        0 for K, 1 for V.
    dtype : torch.dtype
        Of the rows.

    Returns
    -------
    rows : Tensor
        ``[N, H, 64, D]`` of ``dtype``, K with its page center.
    steps : Tensor
        float32 ``[N, H, 64]``: distance between neighbouring codes as read.
    """
    records = view.layout.views(view.records)
    table = view.table[ids.cpu()].to(torch.long)
    h, d = view.layout.n_heads, view.layout.head_dim
    rows = torch.empty(len(ids), h, 64, d, dtype=dtype, device=view.records.device)
    steps = torch.empty(len(ids), h, 64, device=view.records.device)
    bits, read = table[:, TIER + side], read_bits(table, side)
    for b, r in {(int(b), int(r)) for b, r in zip(bits, read)}:
        sel = ((bits == b) & (read == r)).nonzero()[:, 0]
        at = ids[sel]
        slabs = [records.base[at, side]]
        columns = [FINE + side, FINEST + 2 * side, FINEST + 2 * side + 1][: SLABS_OF_BITS[r] - 1]
        slabs += [view.slabs[table[sel, c]] for c in columns]
        scale, mid, gain = records.scale[at, side], records.mid[at, side], records.gain[at, side]
        rows[sel] = decode_pages(slabs, scale, mid, gain, b, dtype)
        steps[sel] = effective_step(scale, gain, b, r)
    if side == K and records.center is not None and records.center_scale is not None:
        rows += decode_center(records.center[ids], records.center_scale[ids]).to(dtype)[:, :, None]
    return rows, steps


def row_variances(view: StoreView, ids: Tensor, side: int, rows: GaussianRows) -> Tensor:
    """Variance of the channels of every row, as its stored step tells it: float32 ``[N, H, 64]``."""
    scale = from_scale16(view.layout.views(view.records).scale[ids, side])
    units = torch.tensor((0.0, *rows.variance[side]), device=scale.device)
    tier = view.table[ids.cpu(), TIER + side].to(scale.device)
    return scale**2 * units[(tier.float().log2().clamp(min=0)).long()][:, None, None]


def page_centers(view: StoreView, ids: Tensor) -> Tensor:
    """Center of every page's K rows, float32 ``[N, H, D]``."""
    records = view.layout.views(view.records)
    if records.center is None or records.center_scale is None:
        return torch.zeros(len(ids), view.layout.n_heads, view.layout.head_dim, device=view.records.device)
    return decode_center(records.center[ids], records.center_scale[ids])


def noise_factors(view: StoreView, ids: Tensor, basis: ReadBasis) -> Tensor:
    """Kappa of each page's K rows, float32 ``[N, H]``."""
    table = view.table[ids.cpu()].to(torch.long)
    tier = torch.tensor([TIERS.index(int(b)) for b in table[:, TIER + K]], dtype=torch.long)
    read = torch.tensor([TIERS.index(int(b)) for b in read_bits(table, K)], dtype=torch.long)
    return basis.kappa[:, tier, read].mT
