"""The numba kernel behind :mod:`lamina.attention.cpu`.

One work item is one sequence, KV head, query token and contiguous share of the pages. A row is unpacked into a D-float
buffer in the first-level cache and used at once for all query heads of its KV head. Items return the maximum, mass and
weighted values of their exact and of their packed rows; a second loop merges them by log-sum-exp and turns the packed
part back into the engine's basis.
"""

import numpy as np
from numba import njit, prange

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
EXACT, PACKED = 0, 1
NEVER = np.float32(-1e30)
"""Stands for minus infinity where fast-math arithmetic may not meet it."""


@njit(parallel=True, fastmath=True, cache=True, nogil=True)
def decode(
    q, q_forward, v_back, mean_v, kappa, records, records16, slabs, exact, table, page_ids, lengths, meta, cap,
    variance, along, partial, spreads, out, lse, spread,
):  # fmt: skip
    """Attend; shapes as in :func:`lamina.attention.cpu.attend_cpu`; fills ``out``, ``lse`` and ``spread``."""
    batch, n_kv, tokens, splits, group, _, _ = partial.shape
    dim = q.shape[3]
    pages = page_ids.shape[1]
    for item in prange(batch * n_kv * tokens * splits):
        part = item % splits
        i = (item // splits) % tokens
        h = (item // (splits * tokens)) % n_kv
        b = item // (splits * tokens * n_kv)
        q_exact = np.empty((group, dim), np.float32)
        q_packed = np.zeros((group, dim), np.float32)
        for g in range(group):
            for c in range(dim):
                q_exact[g, c] = q[b, h * group + g, i, c]
            for c in range(dim):
                _axpy(q_exact[g, c], q_forward[h, c], q_packed[g], dim)
        share = page_ids[b, pages * part // splits : pages * (part + 1) // splits]
        _attend_share(
            q_exact, q_packed, records, records16, slabs, exact, table, share, lengths[b] - tokens + i, kappa[h], meta,
            cap, variance, along, h, partial[b, h, i, part], spreads[b, h, i, part],
        )  # fmt: skip
    for item in prange(batch * n_kv * tokens):
        i = item % tokens
        h = (item // tokens) % n_kv
        b = item // (tokens * n_kv)
        for g in range(group):
            head = h * group + g
            _merge(
                partial[b, h, i, :, g], spreads[b, h, i, :, g], v_back[h], mean_v[h], out[b, i, head],
                lse[:, b, head, i], spread[b, head, i],
            )  # fmt: skip


@njit(fastmath=True)
def _attend_share(
    q, q_packed, records, records16, slabs, exact, table, pages, position, kappa, meta, cap, variance, along, h,
    partial, spread
):  # fmt: skip
    """Rows of some pages for one query token and KV head: fills ``partial [g, 2, D + 2]`` (values, maximum, mass).

    ``spread [g, 3]`` too, if the variances ``[2, 3]`` of rows in units of their squared step are not zero.
    """
    group, dim = q.shape
    quarter = dim // 4
    slab_bytes, scale_at, mid_at, center_at, gain_at, center_scale_at, centered, sink, recent, kind = meta
    n_kv = slab_bytes // (64 * quarter)
    first_recent = position // 64 * 64 - recent
    row = np.empty(dim, np.float32)
    logits = np.empty((group, 64), np.float32)
    total = np.zeros(group, np.float32)
    energy = np.empty(group, np.float32)
    from_center = np.zeros(group, np.float32)
    offset = np.empty(group, np.float32)
    partial[:] = 0
    partial[:, :, dim] = NEVER
    spread[:] = 0
    measured = variance[0, 0] > 0
    errs = np.empty((group if measured else 0, 64), np.float32)
    for g in range(group):
        for c in range(dim):
            total[g] += q_packed[g, c]
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
                _cap(logits[g], n, cap)
                _softmax_step(logits[g], n, partial[g, EXACT], dim)
            for t in range(n):
                _load_exact(exact, kind, slot, 1, h, t, dim, row)
                for g in range(group):
                    _axpy(logits[g, t], row, partial[g, EXACT], dim)
            continue

        bits, fine, f0, f1 = table[page, 2], table[page, 4], table[page, 6], table[page, 7]
        read = _read_bits(fine, f0)
        half = np.float32((1 << read) - 1) / 2
        noise = kappa[_index(bits), _index(read)]
        if centered:
            c_scale = _scale16(records16[page, center_scale_at // 2 + h])
            for c in range(dim):
                code = np.int32(records[page, center_at + h * dim + c])
                row[c] = code if code < 128 else code - 256
            for g in range(group):
                from_center[g] = c_scale * _dot(q_packed[g], row, dim)
        for t in range(n):
            step = _step(records16, page, gain_at // 2 + 2 * h, scale_at // 2 + h * 64 + t, bits, read)
            zero = _bf16(records16[page, mid_at // 2 + h * 64 + t]) - step * half
            _unpack(records, slabs, page, 0, fine, f0, f1, h, t, quarter, row)
            for g in range(group):
                dot = _dot(q_packed[g], row, dim)
                x = step * dot + zero * total[g]
                logits[g, t] = x + from_center[g] - energy[g] * noise * step * step
                if measured:
                    own = _scale16(records16[page, scale_at // 2 + h * 64 + t])
                    w = 2 * energy[g] * variance[0, _index(bits)] * own * own - x * x * along
                    errs[g, t] = max(w, np.float32(0))
        for g in range(group):
            _cap(logits[g], n, cap)
            if measured and cap > 0:
                for t in range(n):
                    errs[g, t] *= (1 - (logits[g, t] / cap) ** 2) ** 2
            before = partial[g, PACKED, dim]
            _softmax_step(logits[g], n, partial[g, PACKED], dim)
            offset[g] = 0
            if measured:
                keep = np.exp(before - partial[g, PACKED, dim])
                spread[g, 0] *= keep
                spread[g, 1] *= keep * keep
                spread[g, 2] *= keep * keep
                for t in range(n):
                    p = logits[g, t]
                    spread[g, 0] += p * errs[g, t]
                    spread[g, 1] += p * p * errs[g, t]

        bits, fine, f0, f1 = table[page, 3], table[page, 5], table[page, 8], table[page, 9]
        read = _read_bits(fine, f0)
        half = np.float32((1 << read) - 1) / 2
        side = n_kv + h
        for t in range(n):
            step = _step(records16, page, gain_at // 2 + 2 * side, scale_at // 2 + side * 64 + t, bits, read)
            zero = _bf16(records16[page, mid_at // 2 + side * 64 + t]) - step * half
            _unpack(records, slabs, page, slab_bytes, fine, f0, f1, h, t, quarter, row)
            if measured:
                own = _scale16(records16[page, scale_at // 2 + side * 64 + t])
                for g in range(group):
                    spread[g, 2] += logits[g, t] ** 2 * variance[1, _index(bits)] * own * own
            for g in range(group):
                offset[g] += logits[g, t] * zero
                _axpy(logits[g, t] * step, row, partial[g, PACKED], dim)
        for g in range(group):
            for c in range(dim):
                partial[g, PACKED, c] += offset[g]


@njit(fastmath=True)
def _merge(partial, spreads, v_back, mean_v, out, lse, spread):
    """Merge ``partial [splits, 2, D + 2]`` of one query head into its output ``[D]``, two log-sum-exps and spread."""
    splits, _, width = partial.shape
    dim = width - 2
    peak = np.full(2, NEVER, np.float32)
    mass = np.zeros(2, np.float32)
    packed = np.zeros(dim, np.float32)
    out[:] = 0
    spread[:] = 0
    for kind in range(2):
        for s in range(splits):
            peak[kind] = max(peak[kind], partial[s, kind, dim])
        for s in range(splits):
            weight = np.exp(partial[s, kind, dim] - peak[kind])
            mass[kind] += weight * partial[s, kind, dim + 1]
            _axpy(weight, partial[s, kind], out if kind == EXACT else packed, dim)
            if kind == PACKED:
                spread[0] += weight * spreads[s, 0]
                spread[1] += weight * weight * spreads[s, 1]
                spread[2] += weight * weight * spreads[s, 2]
    top = max(peak[EXACT], peak[PACKED])
    exact_weight, packed_weight = np.exp(peak[EXACT] - top), np.exp(peak[PACKED] - top)
    total = exact_weight * mass[EXACT] + packed_weight * mass[PACKED]
    for c in range(dim):
        turned = mass[PACKED] * mean_v[c] + _dot(packed, v_back[c], dim)
        out[c] = (exact_weight * out[c] + packed_weight * turned) / total
    share = packed_weight / total
    spread[0] *= share
    spread[1] *= share * share
    spread[2] *= share * share
    lse[0] = peak[PACKED] + np.log(mass[PACKED]) if mass[PACKED] > 0 else -np.inf
    lse[1] = top + np.log(total)


@njit(fastmath=True, inline="always")
def _unpack(records, slabs, page, base, fine, f0, f1, h, t, quarter, row):
    """Codes of one row, as read, into ``row`` (float32 ``[D]``)."""
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
    """One exact row, of any engine dtype, into ``row``."""
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
def _cap(logits, n, cap):
    """Cap n logits, unless ``cap`` is 0."""
    if cap > 0:
        for t in range(n):
            logits[t] = cap * np.tanh(logits[t] / cap)


@njit(fastmath=True, inline="always")
def _softmax_step(logits, n, partial, dim):
    """Turn n logits into weights relative to the running maximum, rescaling what was summed before."""
    peak = partial[dim]
    for t in range(n):
        peak = max(peak, logits[t])
    keep = np.exp(partial[dim] - peak)
    mass = partial[dim + 1] * keep
    for c in range(dim):
        partial[c] *= keep
    for t in range(n):
        logits[t] = np.exp(logits[t] - peak)
        mass += logits[t]
    partial[dim] = peak
    partial[dim + 1] = mass


@njit(fastmath=True, inline="always")
def _step(records16, page, gain_at, scale_at, bits, read):
    """Distance between neighbouring codes of a row, as read."""
    scale = _scale16(records16[page, scale_at])
    if read == bits:
        return scale
    return scale * _scale16(records16[page, gain_at + _index(read)]) * np.float32(1 << (bits - read))


@njit(inline="always")
def _read_bits(fine, finest):
    return 2 if fine < 0 else (4 if finest < 0 else 8)


@njit(inline="always")
def _index(bits):
    return 0 if bits == 2 else (1 if bits == 4 else 2)


@njit(fastmath=True, inline="always")
def _dot(a, b, n):
    s = np.float32(0.0)
    for i in range(n):
        s += a[i] * b[i]
    return s


@njit(fastmath=True, inline="always")
def _axpy(a, x, y, n):
    for i in range(n):
        y[i] += a * x[i]


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
