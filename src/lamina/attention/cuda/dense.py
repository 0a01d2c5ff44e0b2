"""Attention of long chunks over packed pages, in Triton: pages become 16-bit rows once for all queries of a chunk.

For engines in bfloat16: rows of K are float16 relative to a power of two of their page and head, centers included, rows
of V bfloat16, both in the packed basis; so many at a time that scratch memory is bounded, whatever a sequence's length.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.attention.cuda.gpu import LOG2E
from lamina.attention.cuda.parts import Attended
from lamina.attention.types import ReadBasis
from lamina.pages.view import StoreView

ROWS = 64
"""Rows of a program, one a token and query head."""
MOST_NUMBERS = 1 << 25
"""Numbers of K, all heads and sequences together, that are expanded at a time."""
VALUES, HALF = torch.bfloat16, tl.bfloat16
"""What rows of V become and the weights that they are summed with, and, in two parts, bases. Others in tests: products
of bfloat16 are wrong in Triton's interpreter."""
LEAST = tl.constexpr(2.0**-40)
"""What scales of keys and queries are at least: products of two are numbers that a GPU does not take for zero."""


@triton.jit
def _scale16(x):  # type: ignore[no-untyped-def]
    return ((x.to(tl.uint32) << 15) & 0x7FFF8000).to(tl.float32, bitcast=True)


@triton.jit
def _index(bits):  # type: ignore[no-untyped-def]
    return tl.where(bits == 2, 0, tl.where(bits == 4, 1, 2))


@triton.jit
def _planes_of(record, slabs, e, side, h, H: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a head's planes of K or V lie: base, fine, and the two halves of the finest."""
    SLAB: tl.constexpr = 16 * H * D
    slots, own = e + 4 + 3 * side, slabs + h * 16 * D
    return (
        record + side * SLAB + h * 16 * D, own + tl.load(slots).to(tl.int64) * SLAB,
        own + tl.load(slots + 1).to(tl.int64) * SLAB, own + tl.load(slots + 2).to(tl.int64) * SLAB,
    )  # fmt: skip


@triton.jit
def _codes(base, fine, high, low, planes, at, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes of plane P of the channels: two bits of the base, two of ``fine``, four of ``high`` or ``low``."""
    code = (tl.load(base + at).to(tl.int32) >> (2 * P)) & 3
    if planes >= 2:
        code = (code << 2) | ((tl.load(fine + at).to(tl.int32) >> (2 * P)) & 3)
    if planes == 4:
        last = low if P % 2 else high
        code = (code << 4) | ((tl.load(last + at).to(tl.int32) >> (4 * (P // 2))) & 15)
    return code.to(tl.float32)


@triton.jit
def _steps(record, side, h, planes, bits, rows, H: tl.constexpr, D: tl.constexpr, CENTERED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Steps of 64 rows, what code 0 stands for, and the bits that are read."""
    SCALE_AT: tl.constexpr = 32 * H * D
    GAIN_AT: tl.constexpr = SCALE_AT + 512 * H + (H * D if CENTERED else 0)
    t = tl.arange(0, 64)
    numbers = record.to(tl.pointer_type(tl.uint16))
    read = tl.where(planes == 1, 2, 2 * planes)
    scale = _scale16(tl.load(numbers + SCALE_AT // 2 + (side * H + h) * 64 + t))
    middle = tl.load(numbers + SCALE_AT // 2 + 128 * H + (side * H + h) * 64 + t)
    middle = (middle.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    if read != bits:
        gain = _scale16(tl.load(numbers + GAIN_AT // 2 + (side * H + h) * 2 + _index(read)))
        scale *= gain * (1 << (bits - read)).to(tl.float32)
    scale = tl.where(t < rows, scale, 0.0)
    middle = tl.where(t < rows, middle, 0.0)
    return scale, middle - 0.5 * ((1 << read) - 1).to(tl.float32) * scale, read


@triton.jit(do_not_specialize=["width", "first"])
def _expand(  # type: ignore[no-untyped-def]
    records, slabs, entries, counts, kappa, k, v, noise, units, starts, width, first,
    H: tl.constexpr, D: tl.constexpr, RECORD_BYTES: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """One page and head a program; page ``first + i`` of the list goes to place i."""
    i, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if first + i < tl.load(counts + 2 * b):
        Q: tl.constexpr = D // 4
        e = entries + (b * width + first + i).to(tl.int64) * 12  # words of an Entry, see prefill.cu
        record = records + tl.load(e).to(tl.int64) * RECORD_BYTES
        start, rows, kinds, slot = tl.load(e + 1), tl.load(e + 2), tl.load(e + 3), tl.load(e + 10)
        t = tl.arange(0, 64)
        column = tl.arange(0, Q)
        at = t[:, None] * Q + column[None, :]
        page = (b * H + h) * tl.num_programs(0) + i
        to = page * 64 * D + t[:, None] * D + column[None, :]
        step, low, read = _steps(record, 0, h, kinds & 15, (kinds >> 8) & 15, rows, H, D, CENTERED)
        base, fine, high, last = _planes_of(record, slabs, e, 0, h, H, D)
        x0 = _codes(base, fine, high, last, kinds & 15, at, 0) * step[:, None] + low[:, None]
        x1 = _codes(base, fine, high, last, kinds & 15, at, 1) * step[:, None] + low[:, None]
        x2 = _codes(base, fine, high, last, kinds & 15, at, 2) * step[:, None] + low[:, None]
        x3 = _codes(base, fine, high, last, kinds & 15, at, 3) * step[:, None] + low[:, None]
        if CENTERED:
            CENTER_AT: tl.constexpr = 32 * H * D + 512 * H
            scale = record.to(tl.pointer_type(tl.uint16)) + (CENTER_AT + H * D + 8 * H) // 2 + h
            unit = _scale16(tl.load(scale))
            center = record.to(tl.pointer_type(tl.int8)) + CENTER_AT + h * D + column
            x0 += unit * tl.load(center).to(tl.float32)[None, :]
            x1 += unit * tl.load(center + Q).to(tl.float32)[None, :]
            x2 += unit * tl.load(center + 2 * Q).to(tl.float32)[None, :]
            x3 += unit * tl.load(center + 3 * Q).to(tl.float32)[None, :]
        largest = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))
        most = tl.maximum(tl.max(tl.max(largest, 1), 0), LEAST)
        power = (most.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        by = 16384.0 / power
        tl.store(k + to, (x0 * by).to(tl.float16))
        tl.store(k + to + Q, (x1 * by).to(tl.float16))
        tl.store(k + to + 2 * Q, (x2 * by).to(tl.float16))
        tl.store(k + to + 3 * Q, (x3 * by).to(tl.float16))
        spread = tl.load(kappa + h * 9 + 3 * _index((kinds >> 8) & 15) + _index(read)) * step * step
        tl.store(noise + page * 64 + t, tl.where(t < rows, spread, float("inf")))
        tl.store(units + page, power / 16384.0)
        # Pages without exact rows are in no window.
        tl.store(starts + page, tl.where(slot >= 0, start, -(1 << 30)))
        step, low, read = _steps(record, 1, h, (kinds >> 4) & 15, (kinds >> 12) & 15, rows, H, D, CENTERED)
        base, fine, high, last = _planes_of(record, slabs, e, 1, h, H, D)
        for p in tl.static_range(4):
            x = _codes(base, fine, high, last, (kinds >> 4) & 15, at, p) * step[:, None] + low[:, None]
            tl.store(v + to + p * Q, x.to(v.dtype.element_ty))


@triton.jit(do_not_specialize=["q", "of_q", "of_q_head", "count"])
def _turn(  # type: ignore[no-untyped-def]
    q, forward, turned, ups, energies, of_q, of_q_head, count, factor,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Queries in the packed basis, logits of base 2: float16 relative to 2^-15 of a row's largest, ``ups``; what noise
    takes off their logits for each unit of variance, in these units.
    """
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tile * ROWS + tl.arange(0, ROWS)
    token, head = row // G, h * G + row % G
    live, d, some = token < count, tl.arange(0, D), tl.arange(0, STEP)
    x = tl.zeros((ROWS, D), tl.float32)
    start = (b * count + token).to(tl.int64) * of_q + head.to(tl.int64) * of_q_head
    query = q + start[:, None] + some[None, :]
    matrix = forward + h * D * D + some[:, None] * D + d[None, :]
    for c in range(0, D, STEP):
        part, turn = tl.load(query + c, mask=live[:, None], other=0.0), tl.load(matrix + c * D) * factor
        high, turn_high = part.to(HALF), turn.to(HALF)
        x = tl.dot(high, turn_high, x)
        x = tl.dot(high, (turn - turn_high.to(tl.float32)).to(HALF), x)
    top = tl.maximum(tl.max(tl.abs(x), 1), LEAST)
    up = top / 32768.0
    to = (h * tl.num_programs(2) + b) * count * G + row
    tl.store(turned + to.to(tl.int64)[:, None] * D + d[None, :], (x / up[:, None]).to(tl.float16), mask=live[:, None])
    tl.store(ups + to, up, mask=live)
    tl.store(energies + to, tl.maximum(tl.sum(x * x, 1) * 0.34657359, 1e-30) / up, mask=live)


@triton.jit(
    do_not_specialize=[
        "lse", "lse_packed", "lse_own", "lengths", "of_lse", "of_own", "total", "tokens", "first", "count", "place",
        "piece", "pages", "recent",
    ]
)  # fmt: skip
def _attend(  # type: ignore[no-untyped-def]
    q, ups, energies, back, mean, k, v, noise, units, starts, counts, lengths, state, exact, lse_exact, lse_own,
    out, lse, lse_packed,
    of_lse, of_own, total, tokens, first, count, place, piece, pages, recent, softcap,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, CAPPED: tl.constexpr,
    OWN: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Running softmax of rows, one a token and query head of a KV head, over pages [place, place + piece) of the list.

    What it came to goes to ``state``; after the last page it is turned back and merged with exact rows and, in ``out``,
    the chunk itself.
    """
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tile * ROWS + tl.arange(0, ROWS)
    token, head = row // G, h * G + row % G
    live, where = token < count, b * count + token
    t, d, some = tl.arange(0, 64), tl.arange(0, D), tl.arange(0, STEP)

    # Through shared memory, from where products take them best.
    mine = (h * tl.num_programs(2) + b) * count * G + row
    turned = tl.load(q + mine.to(tl.int64)[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
    up, energy = tl.load(ups + mine, mask=live, other=1.0), tl.load(energies + mine, mask=live, other=1.0)
    limit = (tl.load(lengths + b) - tokens + first + token) // 64 * 64 - recent

    # What earlier pages came to.
    more = token < tl.where(place > 0, count, 0)
    m = tl.load(lse_packed + head * of_lse + where, mask=more, other=float("-inf")) * 1.4426950408889634
    l = tl.where(m == float("-inf"), 0.0, 1.0)
    kept = (head.to(tl.int64) * total + where)[:, None] * D
    o = tl.load(state + kept + d[None, :], mask=more[:, None], other=0.0)
    at = (b * H + h) * piece
    for j in range(tl.minimum(tl.load(counts + 2 * b) - place, piece)):
        keys = tl.load(k + (at + j) * 64 * D + t[None, :] * D + d[:, None])
        unit, start = tl.load(units + at + j), tl.load(starts + at + j)
        spread = tl.load(noise + (at + j) * 64 + t)
        s = tl.dot(turned, keys) - (energy / unit)[:, None] * spread[None, :]
        by, hidden = up * unit, tl.where(start >= limit, float("-inf"), 0.0)
        if CAPPED:
            bent = softcap * (1.0 - 2.0 / (tl.exp2(s * (by / softcap * 2.8853900817779268)[:, None]) + 1.0))
            s = tl.where(s == float("-inf"), s, bent)
            by = tl.full((ROWS,), 1.0, tl.float32)
        higher = tl.maximum(m, tl.max(s, 1) * by + hidden)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s * by[:, None] + (hidden - base)[:, None])
        keep = tl.exp2(m - base)
        l = l * keep + tl.sum(p, 1)
        values = tl.load(v + (at + j) * 64 * D + t[:, None] * D + d[None, :])
        o = tl.dot(p.to(v.dtype.element_ty), values, o * keep[:, None])
        m = higher

    packed = tl.where(l > 0.0, m + tl.log2(tl.where(l > 0.0, l, 1.0)), float("-inf"))
    tl.store(lse_packed + head * of_lse + where, packed * 0.69314718056, mask=live)
    share = 1.0 / tl.where(l > 0.0, l, 1.0)
    if place + piece < pages:
        tl.store(state + kept + d[None, :], o * share[:, None], mask=live[:, None])
    else:
        apart = tl.load(lse_exact + head * total + where, mask=live, other=0.0) * 1.4426950408889634
        most = tl.maximum(packed, apart)
        if OWN:
            own = tl.load(lse_own + head * of_own + where, mask=live, other=0.0) * 1.4426950408889634
            most = tl.maximum(most, own)
        w_packed, w_exact = tl.exp2(packed - most), tl.exp2(apart - most)
        mass = w_packed + w_exact
        if OWN:
            w_own = tl.exp2(own - most)
            mass += w_own
            w_own /= mass
        w_packed /= mass
        w_exact /= mass
        tl.store(lse + head * of_lse + where, (most + tl.log2(mass)) * 0.69314718056, mask=live)
        weighed = o * (share * w_packed)[:, None]
        high = weighed.to(HALF)
        low = (weighed - high.to(tl.float32)).to(HALF)
        to = out + (where.to(tl.int64) * (H * G) + head)[:, None] * D + some[None, :]
        turned_back = back + h * D * D + some[None, :] * D + d[:, None]
        for c in range(0, D, STEP):
            column = tl.load(turned_back + c * D)
            column_high = column.to(HALF)
            y = tl.dot(high, column_high) + w_packed[:, None] * tl.load(mean + h * D + c + some)[None, :]
            y = tl.dot(high, (column - column_high.to(tl.float32)).to(HALF), y)
            y = tl.dot(low, column_high, y)
            y += w_exact[:, None] * tl.load(exact + kept + c + some[None, :], mask=live[:, None], other=0.0)
            if OWN:
                y += w_own[:, None] * tl.load(to + c, mask=live[:, None], other=0.0).to(tl.float32)
            tl.store(to + c, y.to(out.dtype.element_ty), mask=live[:, None])


def attend_expanded(
    q: Tensor, view: StoreView, basis: ReadBasis, listed: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor],
    lse_own: Tensor | None, to: Attended, tokens: int, first: int, pages: int,
) -> None:  # fmt: skip
    """Attend to packed pages, and merge with what exact rows came to.

    Parameters
    ----------
    q : Tensor
        ``[B n, Hq, D]`` in bfloat16: n query tokens of each of B sequences.
    view, basis
        As of :func:`lamina.attention.cuda.prefill.attend_prefill`, on the GPU.
    listed : (Tensor, Tensor)
        int32 ``[B, P, 12]`` and ``[B, 2]``: entries of ``lamina_list`` and how many there are of the packed pages.
    exact : (Tensor, Tensor)
        float32 ``[Hq, B n, D]`` and ``[Hq, B n]``: attention to exact rows of pages, and its log-sum-exp.
    lse_own : Tensor, optional
        float32 ``[Hq, B n]``: log-sum-exp of the chunk's attention to itself, which ``to.out`` holds then; without, the
        chunk is among the exact rows.
    to : Attended
        All that there is.
    tokens, first : int
        Tokens of each sequence's chunk, and the first of them that is asked for.
    pages : int
        At most as many pages are packed.
    """
    (entries, counts), (total, n_q, dim) = listed, q.shape
    batch, width = entries.shape[:2]
    heads, count, device = view.layout.n_heads, total // batch, q.device
    piece = max(1, min(pages, MOST_NUMBERS // (batch * heads * 64 * dim)))
    shape = batch, heads, piece, 64
    k, v = (torch.empty(*shape, dim, dtype=dtype, device=device) for dtype in (torch.float16, VALUES))
    noise, units = (torch.empty(s, dtype=torch.float32, device=device) for s in (shape, shape[:3]))
    starts = torch.empty(shape[:3], dtype=torch.int32, device=device)
    state = torch.empty_like(exact[0]) if piece < pages else exact[0]
    turned = torch.empty(heads, batch, count * (n_q // heads), dim, dtype=torch.float16, device=device)
    ups, energies = (torch.empty(turned.shape[:3], dtype=torch.float32, device=device) for _ in range(2))
    own = to.lse if lse_own is None else lse_own
    warps, stages = (4, 3) if dim <= 128 else (8, 2)
    grid = triton.cdiv(turned.shape[2], ROWS), heads, batch
    shape_of = {"H": heads, "G": n_q // heads, "D": dim, "ROWS": ROWS, "STEP": min(dim, 32), "HALF": HALF}
    with torch.cuda.device(device) if q.is_cuda else nullcontext():
        _turn[grid](
            q, basis.q_forward, turned, ups, energies, *q.stride()[:2], count, basis.scaling * LOG2E, **shape_of,
            num_warps=4,
        )  # fmt: skip
        for place in range(0, pages, piece):
            _expand[piece, heads, batch](
                view.records, view.slabs, entries, counts, basis.kappa, k, v, noise, units, starts, width, place,
                H=heads, D=dim, RECORD_BYTES=view.layout.record_bytes, CENTERED=view.layout.centered, num_warps=8,
            )  # fmt: skip
            _attend[grid](
                turned, ups, energies, basis.v_back, basis.mean_v, k, v, noise, units, starts, counts, view.lengths,
                state, *exact, own, to.out, to.lse, to.lse_packed, to.lse.stride(0), own.stride(0), total, tokens,
                first, count, place, piece, pages, view.window.recent, basis.softcap * LOG2E, **shape_of,
                CAPPED=basis.softcap != 0, OWN=lse_own is not None, num_warps=warps, num_stages=stages,
            )  # fmt: skip
