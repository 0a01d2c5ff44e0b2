"""Decode attention on the CPU: compiled with numba, reads packed planes, keeps no decoded copy of the cache.

One work item is one sequence, KV head and contiguous share of the pages. A row is unpacked into a D-float buffer in the
first-level cache and used at once for all query heads of its KV head; items return (maximum, mass, weighted values) of
their exact and packed rows, which are merged by log-sum-exp.
"""

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from lamina.attention.types import AttentionOutput, ReadBasis
from lamina.pages.store import StoreView

MAX_QUERIES = 8
"""Query tokens up to which this path is used; longer chunks are faster as matrix products."""

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
EXACT_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
NEVER = np.float32(-1e30)
"""Stands for minus infinity where fast-math arithmetic may not meet it."""


def attend_cpu(q_bhtd: Tensor, view: StoreView, basis: ReadBasis) -> AttentionOutput:
    """Attend from the last T tokens of each sequence, T at most ``MAX_QUERIES``.

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
    layout = view.layout
    kind = EXACT_KINDS[view.exact.dtype]
    exact = view.exact if kind == FLOAT32 else view.exact.view(torch.int16)
    group = n_q // n_kv
    q = (q_bhtd.float() * basis.scaling).view(batch, n_kv, group, tokens, dim).transpose(2, 3)
    q_packed = (q.transpose(0, 1).reshape(n_kv, -1, dim) @ basis.q_forward).view(n_kv, batch, tokens, group, dim)
    splits = _splits(batch * n_kv * tokens, view.page_ids.shape[1])
    shape = (batch, n_kv, tokens, splits, group, 2)
    acc = np.empty((*shape, dim), np.float32)
    stats = np.empty((*shape, 2), np.float32)
    _attend(
        q.contiguous().numpy(),
        q_packed.transpose(0, 1).contiguous().numpy(),
        view.records.numpy(),
        view.records.view(torch.int16).numpy(),
        view.slabs.numpy(),
        exact.numpy(),
        view.table.numpy(),
        view.page_ids.numpy(),
        view.lengths.numpy(),
        basis.kappa.numpy(),
        np.array(
            [layout.slab_bytes, layout.scale_offset, layout.mid_offset, layout.center_offset, layout.gain_offset,
             layout.center_scale_offset, view.window.sink, view.window.recent, kind, layout.centered]
        ),
        acc,
        stats,
    )  # fmt: skip
    out, lse_packed, lse = _merge(torch.from_numpy(acc), torch.from_numpy(stats), basis)
    out = out.transpose(1, 2).reshape(batch, tokens, n_q, dim).to(q_bhtd.dtype)
    return AttentionOutput(out, *(x.permute(0, 1, 3, 2).reshape(batch, n_q, tokens) for x in (lse_packed, lse)))


def _splits(items: int, pages: int) -> int:
    """Shares that the pages are cut into, so that every thread has work and none gets less than 4 pages."""
    threads = torch.get_num_threads()
    return max(1, min(pages // 4, -(-4 * threads // items))) if threads > 1 else 1


def _merge(acc: Tensor, stats: Tensor, basis: ReadBasis) -> tuple[Tensor, Tensor, Tensor]:
    """Merge partial results ``[B, H, T, splits, g, 2 (exact, packed), D]``."""
    peak, mass = stats[..., 0], stats[..., 1]
    top = peak.amax((3, 5), keepdim=True)
    weight = (peak - top).exp_()
    total = (mass * weight).sum(3)
    sums = (acc * weight[..., None]).sum(3)
    packed = sums[..., 1, :].transpose(0, 1)
    packed = (packed.reshape(packed.shape[0], -1, packed.shape[-1]) @ basis.v_forward.mT).view(packed.shape)
    packed = packed.transpose(0, 1) + total[..., 1, None] * basis.mean_v[:, None, None]
    both = total.sum(-1)
    top = top[:, :, :, 0, :, 0]
    return (sums[..., 0, :] + packed) / both[..., None], top + total[..., 1].log(), top + both.log()


@njit(inline="always")
def _scale16(bits):
    return np.int32((np.int32(bits) & 0xFFFF) << 15).view(np.float32)


@njit(inline="always")
def _bf16(bits):
    return np.int32(np.int32(bits) << 16).view(np.float32)


@njit(inline="always")
def _fp16(bits):
    wide = np.int32(bits)
    magnitude = np.int32((wide & 0x7FFF) << 13).view(np.float32) * np.float32(2.0**112)
    return -magnitude if wide & 0x8000 else magnitude


@njit(fastmath=True, inline="always")
def _unpack(records, slabs, page, base, fine, f0, f1, h, t, quarter, row):
    """Codes of one row, as read, into ``row`` (float32 [D])."""
    at = base + (h * 64 + t) * quarter
    if fine < 0:
        for i in range(quarter):
            x = np.int32(records[page, at + i])
            row[i] = x & 3
            row[quarter + i] = (x >> 2) & 3
            row[2 * quarter + i] = (x >> 4) & 3
            row[3 * quarter + i] = x >> 6
    elif f0 < 0:
        for i in range(quarter):
            x = np.int32(records[page, at + i])
            y = np.int32(slabs[fine, h, t, i])
            row[i] = ((x & 3) << 2) | (y & 3)
            row[quarter + i] = (x & 12) | ((y >> 2) & 3)
            row[2 * quarter + i] = ((x >> 2) & 12) | ((y >> 4) & 3)
            row[3 * quarter + i] = ((x >> 4) & 12) | (y >> 6)
    else:
        for i in range(quarter):
            x = np.int32(records[page, at + i])
            y = np.int32(slabs[fine, h, t, i])
            z = np.int32(slabs[f0, h, t, i])
            w = np.int32(slabs[f1, h, t, i])
            row[i] = ((x & 3) << 6) | ((y & 3) << 4) | (z & 15)
            row[quarter + i] = ((x & 12) << 4) | ((y & 12) << 2) | (w & 15)
            row[2 * quarter + i] = ((x & 48) << 2) | (y & 48) | (z >> 4)
            row[3 * quarter + i] = (x & 192) | ((y & 192) >> 2) | (w >> 4)


@njit(fastmath=True, inline="always")
def _load_exact(exact, kind, slot, side, h, t, dim, row):
    if kind == FLOAT32:
        for i in range(dim):
            row[i] = exact[slot, side, h, t, i]
    elif kind == BFLOAT16:
        for i in range(dim):
            row[i] = _bf16(exact[slot, side, h, t, i])
    else:
        for i in range(dim):
            row[i] = _fp16(exact[slot, side, h, t, i])


@njit(fastmath=True, inline="always")
def _dot(a, b, n):
    s = np.float32(0.0)
    for i in range(n):
        s += a[i] * b[i]
    return s


@njit(fastmath=True, inline="always")
def _step(records16, page, gain_at, at, bits, read):
    """Scale of a row as read."""
    s = _scale16(records16[page, at])
    if read == bits:
        return s
    return s * _scale16(records16[page, gain_at + (0 if read == 2 else 1)]) * np.float32(1 << (bits - read))


@njit(parallel=True, fastmath=True, cache=True)
def _attend(q, q_packed, records, records16, slabs, exact, table, page_ids, lengths, kappa, meta, acc, stats):
    batch, n_kv, tokens, _, _ = q.shape
    splits = acc.shape[3]
    for item in prange(batch * n_kv * tokens * splits):
        part = item % splits
        i = (item // splits) % tokens
        h = (item // (splits * tokens)) % n_kv
        b = item // (splits * tokens * n_kv)
        pages = page_ids.shape[1]
        _attend_item(
            q[b, h, i],
            q_packed[b, h, i],
            records,
            records16,
            slabs,
            exact,
            table,
            page_ids[b, pages * part // splits : pages * (part + 1) // splits],
            lengths[b] - tokens + i,
            kappa[h],
            meta,
            h,
            acc[b, h, i, part],
            stats[b, h, i, part],
        )


@njit(fastmath=True)
def _attend_item(q, q_packed, records, records16, slabs, exact, table, pages, position, kappa, meta, h, acc, stats):
    group, dim = q.shape
    quarter = dim // 4
    slab_bytes, scale_at, mid_at, center_at, gain_at, center_scale_at, sink, recent, kind, centered = meta
    n_kv = slab_bytes // (64 * quarter)
    first_recent = position // 64 * 64 - recent
    row = np.empty(dim, np.float32)
    logits = np.empty((group, 64), np.float32)
    total = np.empty(group, np.float32)
    energy = np.empty(group, np.float32)
    from_center = np.empty(group, np.float32)
    offset = np.empty(group, np.float32)
    acc[:] = 0
    stats[:, :, 0] = NEVER
    stats[:, :, 1] = 0
    for g in range(group):
        total[g] = 0
        for i in range(dim):
            total[g] += q_packed[g, i]
        energy[g] = _dot(q_packed[g], q_packed[g], dim) / 2

    for page in pages:
        if page < 0:
            continue
        start = table[page, 0]
        n = min(table[page, 1], position + 1 - start)
        if n <= 0:
            continue
        slot = table[page, 10]
        if table[page, 2] == 0 or (slot >= 0 and (start < sink or start >= first_recent)):
            for t in range(n):
                _load_exact(exact, kind, slot, 0, h, t, dim, row)
                for g in range(group):
                    logits[g, t] = _dot(q[g], row, dim)
            for g in range(group):
                _softmax_step(logits[g], n, acc[g, 0], stats[g, 0])
            for t in range(n):
                _load_exact(exact, kind, slot, 1, h, t, dim, row)
                for g in range(group):
                    _axpy(logits[g, t], row, acc[g, 0], dim)
            continue

        bits, fine, f0, f1 = table[page, 2], table[page, 4], table[page, 6], table[page, 7]
        read = 2 if fine < 0 else (4 if f0 < 0 else 8)
        half = np.float32((1 << read) - 1) / 2
        noise = kappa[_index(bits), _index(read)]
        from_center[:] = 0
        if centered:
            c_scale = _scale16(records16[page, center_scale_at // 2 + h])
            for i in range(dim):
                x = np.int32(records[page, center_at + h * dim + i])
                row[i] = x if x < 128 else x - 256
            for g in range(group):
                from_center[g] = c_scale * _dot(q_packed[g], row, dim)
        for t in range(n):
            step = _step(records16, page, gain_at // 2 + 2 * h, scale_at // 2 + h * 64 + t, bits, read)
            mid = _bf16(records16[page, mid_at // 2 + h * 64 + t]) - step * half
            _unpack(records, slabs, page, 0, fine, f0, f1, h, t, quarter, row)
            for g in range(group):
                code_dot = _dot(q_packed[g], row, dim)
                logits[g, t] = step * code_dot + mid * total[g] + from_center[g] - energy[g] * noise * step * step
        for g in range(group):
            _softmax_step(logits[g], n, acc[g, 1], stats[g, 1])
            offset[g] = 0

        bits, fine, f0, f1 = table[page, 3], table[page, 5], table[page, 8], table[page, 9]
        read = 2 if fine < 0 else (4 if f0 < 0 else 8)
        half = np.float32((1 << read) - 1) / 2
        for t in range(n):
            step = _step(
                records16, page, gain_at // 2 + 2 * (n_kv + h), scale_at // 2 + (n_kv + h) * 64 + t, bits, read
            )
            mid = _bf16(records16[page, mid_at // 2 + (n_kv + h) * 64 + t]) - step * half
            _unpack(records, slabs, page, slab_bytes, fine, f0, f1, h, t, quarter, row)
            for g in range(group):
                offset[g] += logits[g, t] * mid
                _axpy(logits[g, t] * step, row, acc[g, 1], dim)
        for g in range(group):
            for i in range(dim):
                acc[g, 1, i] += offset[g]


@njit(fastmath=True, inline="always")
def _index(bits):
    return 0 if bits == 2 else (1 if bits == 4 else 2)


@njit(fastmath=True, inline="always")
def _softmax_step(logits, n, acc, stats):
    """Turn n logits into weights relative to the running maximum, rescaling what was summed before."""
    peak = stats[0]
    for t in range(n):
        peak = max(peak, logits[t])
    keep = np.exp(stats[0] - peak)
    mass = stats[1] * keep
    for i in range(acc.shape[0]):
        acc[i] *= keep
    for t in range(n):
        logits[t] = np.exp(logits[t] - peak)
        mass += logits[t]
    stats[0] = peak
    stats[1] = mass


@njit(fastmath=True, inline="always")
def _axpy(a, x, y, n):
    for i in range(n):
        y[i] += a * x[i]
