"""Decode attention on the CPU: reads packed planes, keeps no decoded copy of the cache."""

import threading

import numpy as np
import torch
from torch import Tensor

from lamina.attention.cpu_kernel import BFLOAT16, FLOAT16, FLOAT32, decode
from lamina.attention.types import AttentionOutput, ReadBasis
from lamina.pages.view import StoreView

MIN_PAGES = 4
LOCK = threading.Lock()
EXACT_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


def attend_cpu(q_bhtd: Tensor, view: StoreView, basis: ReadBasis) -> AttentionOutput:
    """Attend from the last T tokens of each sequence, a few at most.

    Parameters
    ----------
    q_bhtd : Tensor
        ``[B, Hq, T, D]`` on the CPU, after RoPE.
    view : StoreView
        Pages, the T tokens included.
    basis : ReadBasis
        How packed rows are read.
    """
    batch, n_q, tokens, dim = q_bhtd.shape
    n_kv = basis.mean_v.shape[0]
    kind = EXACT_KINDS[view.exact.dtype]
    layout, window = view.layout, view.window
    splits = _splits(batch * n_kv * tokens, view.page_ids.shape[1])
    partial = np.empty((batch, n_kv, tokens, splits, n_q // n_kv, 2, dim + 2), np.float32)
    spreads = np.empty((batch, n_kv, tokens, splits, n_q // n_kv, 3), np.float32)
    out = np.empty((batch, tokens, n_q, dim), np.float32)
    spread = np.empty((batch, n_q, tokens, 3), np.float32)
    lse = np.empty((2, batch, n_q, tokens), np.float32)
    meta = (
        layout.slab_bytes,
        layout.scale_offset,
        layout.mid_offset,
        layout.center_offset,
        layout.gain_offset,
        layout.center_scale_offset,
        int(layout.centered),
        window.sink,
        window.recent,
        kind,
    )
    cap, rows = np.float32(basis.softcap), basis.rows
    variance = np.zeros((2, 3), np.float32) if rows is None else np.array(rows.variance, np.float32)
    along = np.float32(1 / dim if rows is not None and rows.aligned else 0)
    # Some of numba's threading layers abort when two threads enter them.
    with LOCK:
        decode(
            (q_bhtd.float() * basis.scaling).contiguous().numpy(),
            basis.q_forward.numpy(),
            basis.v_back.numpy(),
            basis.mean_v.numpy(),
            basis.kappa.numpy(),
            view.records.numpy(),
            view.records.view(torch.int16).numpy(),
            view.slabs.numpy(),
            (view.exact if kind == FLOAT32 else view.exact.view(torch.int16)).numpy(),
            view.table.numpy(),
            view.page_ids.numpy(),
            view.lengths.numpy(),
            meta,
            cap,
            variance,
            along,
            partial,
            spreads,
            out,
            lse,
            spread,
        )
    lse_packed, lse_all = torch.from_numpy(lse)
    measured = None if rows is None else torch.from_numpy(spread)
    return AttentionOutput(torch.from_numpy(out).to(q_bhtd.dtype), lse_packed, lse_all, measured)


def _splits(items: int, pages: int) -> int:
    """Shares that the pages are cut into, so that every thread has work and none gets less than ``MIN_PAGES``."""
    threads = torch.get_num_threads()
    items = max(items, 1)
    return max(1, min(pages // MIN_PAGES, -(-4 * threads // items))) if threads > 1 else 1
