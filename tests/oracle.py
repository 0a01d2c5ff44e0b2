"""Independent oracle in float64 numpy, written from SPEC 3 to 5 and the documented byte layout; imports no lamina.

Shapes: H KV heads, D head dimension, 64 rows a page. ``near`` marks what single precision may legitimately round
differently: elements whose final assignment lies within a small distance of a border, and rows in which an
intermediate decision did.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

PAGE = 64
BORDER = 1e-5
"""Distance from a rounding border, in codes, below which float32 may round the other way."""


# ---------------------------------------------------------------------------------------------- 16-bit number formats
def round_binary(x, fraction_bits):
    """Round to nearest even with 8 exponent bits and ``fraction_bits`` mantissa bits, subnormals included."""
    x = np.asarray(x, np.float64)
    exponent = np.maximum(np.frexp(x)[1] - 1, -126)
    unit = np.ldexp(1.0, exponent - fraction_bits)
    return np.round(x / unit) * unit


def unit_of(x, fraction_bits):
    """Distance between neighbouring numbers of the format at x."""
    return np.ldexp(1.0, np.maximum(np.frexp(np.asarray(x, np.float64))[1] - 1, -126) - fraction_bits)


def scale16(x):
    """Round to scale16: 8 exponent and 8 mantissa bits, no sign; the largest finite value saturates."""
    return np.minimum(round_binary(x, 8), (2 - 2.0**-8) * 2.0**127)


def bf16(x):
    """Round to bfloat16."""
    return round_binary(x, 7)


def read_scale16(bits):
    """Decode 16-bit integers that hold scale16."""
    bits = np.asarray(bits).astype(np.int64) & 0xFFFF
    return _read_float(bits >> 8, bits & 0xFF, 8)


def read_bf16(bits):
    """Decode 16-bit integers that hold bfloat16."""
    bits = np.asarray(bits).astype(np.int64) & 0xFFFF
    return np.where(bits >> 15, -1.0, 1.0) * _read_float((bits >> 7) & 0xFF, bits & 0x7F, 7)


def _read_float(exponent, fraction, fraction_bits):
    normal = np.ldexp(1 + fraction / 2.0**fraction_bits, exponent - 127)
    return np.where(exponent > 0, normal, np.ldexp(fraction / 2.0**fraction_bits, -126))


# -------------------------------------------------------------------------------------------------------- bit planes
def channel(p, i, dim):
    """Channel that the packing docs call (p, i)."""
    return p * (dim // 4) + i


def pack(codes, bits):
    """Codes ``[..., D]`` -> list of 1, 2 or 4 slabs ``[..., D/4]``, one channel at a time."""
    dim = codes.shape[-1]
    codes = codes.astype(np.int64)
    slabs = [np.zeros((*codes.shape[:-1], dim // 4), np.int64) for _ in range({2: 1, 4: 2, 8: 4}[bits])]
    for i in range(dim // 4):
        for p in range(4):
            c = codes[..., channel(p, i, dim)]
            slabs[0][..., i] += (c >> (bits - 2)) << (2 * p)
            if bits >= 4:
                slabs[1][..., i] += ((c >> (bits - 4)) % 4) << (2 * p)
            if bits == 8:
                slabs[2 + p % 2][..., i] += (c % 16) << (4 * (p // 2))
    return [s.astype(np.uint8) for s in slabs]


def unpack(slabs):
    """Codes ``[..., D]`` of 2, 4 or 8 bits from the 1, 2 or 4 most significant slabs."""
    quarter = slabs[0].shape[-1]
    codes = np.zeros((*slabs[0].shape[:-1], 4 * quarter), np.int64)
    for p in range(4):
        at = slice(p * quarter, (p + 1) * quarter)
        for slab in slabs[:2]:
            codes[..., at] = codes[..., at] * 4 + ((slab.astype(np.int64) >> (2 * p)) % 4)
        if len(slabs) == 4:
            codes[..., at] = codes[..., at] * 16 + ((slabs[2 + p % 2].astype(np.int64) >> (4 * (p // 2))) % 16)
    return codes


# -------------------------------------------------------------------------------------------------------- scale rules
@dataclass
class Rows:
    """Quantised rows: ``codes`` [..., D], ``scale`` and ``mid`` [...] before rounding to 16 bits, and what is near."""

    codes: np.ndarray
    scale: np.ndarray
    mid: np.ndarray
    near: np.ndarray
    near_row: np.ndarray


def quantise(x, bits, rule, clip_ratio=1.0, border=BORDER):
    """Quantise rows ``[..., D]`` by the rules of SPEC 4; at 4 bits ``unbiased`` starts from the min/max grid."""
    x = np.asarray(x, np.float64)
    if rule == "clip" and bits == 2:
        dim = x.shape[-1]
        limit = np.sort(np.abs(x), -1)[..., min(int(np.floor(clip_ratio * dim)), dim - 1), None]
        x = np.clip(x, -limit, limit)
    if rule == "unbiased" and bits < 8:
        return _unbiased(x, bits, border)
    return _minmax(x, bits, border)


def _minmax(x, bits, border):
    low, high = x.min(-1), x.max(-1)
    scale, mid = (high - low) / (2**bits - 1), (low + high) / 2
    codes, gap = _assign(x - bf16(mid)[..., None], scale16(scale), (2**bits - 1) / 2, bits)
    # a scale or midpoint that lies on a rounding border of its format moves the whole row
    fuzz = 2e-7 * np.maximum(abs(low), abs(high))
    row = _tie_gap(scale, 8) < fuzz / (2**bits - 1)
    row |= _tie_gap(mid, 7) < fuzz
    return Rows(codes, scale, mid, gap < border, row)


def _unbiased(x, bits, border):
    levels = 2**bits
    half = (levels - 1) / 2
    mean = x.mean(-1)
    y = x - mean[..., None]
    if bits == 2:
        codes, gap = _assign(y, 0.9957 * y.std(-1), half, bits)
        row = gap.min(-1) < border
    else:
        start = _minmax(x, bits, border)
        codes, row = start.codes, start.near_row | start.near.any(-1)
    for last in (False, True):
        c = codes - codes.mean(-1, keepdims=True)
        codes, gap = _assign(y, _divide((y * c).sum(-1), (c * c).sum(-1)), codes.mean(-1), bits)
        if not last:
            row |= gap.min(-1) < border
    c = codes - codes.mean(-1, keepdims=True)
    fitted = _divide((y * c).sum(-1), (c * c).sum(-1))
    scale = np.clip(_divide((y * y).sum(-1), (y * c).sum(-1)), fitted / 2, fitted * 2)
    mid = mean + scale16(scale) * (half - codes.mean(-1))
    return Rows(codes, scale, mid, gap < border, row)


def _assign(y, step, offset, bits):
    offset = np.asarray(offset, np.float64)[..., None]
    grid = _divide(y, step[..., None]) + offset + 0.5
    gap = abs(grid - np.clip(np.round(grid), 1, 2**bits - 1))
    return np.clip(np.floor(grid), 0, 2**bits - 1).astype(np.int64), gap


def _tie_gap(x, fraction_bits):
    unit = unit_of(x, fraction_bits)
    return abs(x / unit - np.floor(x / unit) - 0.5) * unit


def _divide(a, b):
    a, b = np.broadcast_arrays(a, b)
    return np.divide(a, b, out=np.zeros(a.shape), where=b > 0)


# -------------------------------------------------------------------------------------------------------------- pages
def page_center(x):
    """Center of pages ``[..., 64, D]``: ratio to the (rounded) scale before rounding, and that scale ``[...]``."""
    mean = x.mean(-2)
    scale = scale16(abs(mean).max(-1) / 127)
    return _divide(mean, scale[..., None]), scale


def truncation(x, codes, scale, bits, read):
    """Unbiased gain ``[...]`` of pages ``[..., 64, D]`` that are read at fewer bits, before rounding to 16 bits."""
    y = x - x.mean(-1, keepdims=True)
    top = codes // 2 ** (bits - read)
    back = (top - top.mean(-1, keepdims=True)) * (scale * 2 ** (bits - read))[..., None]
    dot = (y * back).sum((-1, -2))
    return np.where(dot > 0, np.clip(_divide((y * y).sum((-1, -2)), dot), 0.5, 2), 1.0)


def decode(codes, scale, mid, bits, read, gain=1.0):
    """Rows from the top ``read`` bits of ``bits``-bit codes; the missing low bits are read as their midpoint."""
    missing = bits - read
    full = codes * 2.0**missing + (2.0**missing - 1) / 2
    return mid[..., None] + (scale * gain)[..., None] * (full - (2.0**bits - 1) / 2)


# ----------------------------------------------------------------------------------------------------- stored bytes
@dataclass
class Stored:
    """Bytes of one layer, as numpy arrays: see ``RecordLayout`` and ``pages/table.py`` for what they hold."""

    records: np.ndarray
    slabs: np.ndarray
    exact: np.ndarray
    table: np.ndarray
    page_ids: np.ndarray
    lengths: np.ndarray
    n_heads: int
    dim: int
    centered: bool
    sink: int
    recent: int

    @cached_property
    def offsets(self):
        """Byte ranges of a record's fields, in the documented order without gaps."""
        h, d = self.n_heads, self.dim
        sizes = {"base": 2 * h * PAGE * d // 4, "scale": 4 * h * PAGE, "mid": 4 * h * PAGE}
        sizes |= {"center": h * d * self.centered, "gain": 8 * h, "center_scale": 2 * h * self.centered}
        found, at = {}, 0
        for name, size in sizes.items():
            found[name] = slice(at, at + size)
            at += size
        return found

    def field(self, page, name, kind, *shape):
        """A field of a page's record."""
        return self.records[page, self.offsets[name]].copy().view(kind).reshape(shape)

    def defined(self, page):
        """The page's record without its padding."""
        return self.records[page, : self.offsets["center_scale"].stop]

    def slots(self, page, side):
        """Slots of the slabs that a side still has beyond its base plane."""
        row = self.table[page]
        return [int(s) for s in (row[4 + side], row[6 + 2 * side], row[7 + 2 * side]) if s >= 0]

    def read(self, page, side):
        """Rows ``[H, 64, D]`` in the packed basis as read now, and their step ``[H, 64]``."""
        h, d = self.n_heads, self.dim
        bits = int(self.table[page, 2 + side])
        slabs = [self.field(page, "base", np.uint8, 2, h, PAGE, d // 4)[side]]
        slabs += [self.slabs[s] for s in self.slots(page, side)]
        read = {1: 2, 2: 4, 4: 8}[len(slabs)]
        scale = read_scale16(self.field(page, "scale", np.uint16, 2, h, PAGE)[side])
        mid = read_bf16(self.field(page, "mid", np.uint16, 2, h, PAGE)[side])
        gain = np.ones(h)
        if read < bits:
            gain = read_scale16(self.field(page, "gain", np.uint16, 2, h, 2)[side, :, 0 if read == 2 else 1])
        rows = decode(unpack(slabs), scale, mid, bits, read, gain[:, None])
        if side == 0:
            rows = rows + self.center(page)
        return rows, scale * gain[:, None] * 2.0 ** (bits - read)

    def scale(self, page, side):
        """Steps ``[H, 64]`` as they were stored, whatever planes were dropped."""
        return read_scale16(self.field(page, "scale", np.uint16, 2, self.n_heads, PAGE)[side])

    def center(self, page):
        """Center ``[H, 1, D]`` of a page's K rows."""
        h, d = self.n_heads, self.dim
        if not self.centered:
            return np.zeros((h, 1, d))
        codes = self.field(page, "center", np.int8, h, d).astype(np.float64)
        return (codes * read_scale16(self.field(page, "center_scale", np.uint16, h))[:, None])[:, None]

    def bits_read(self, page, side):
        """Bits that a side of a page is read at."""
        return {0: 2, 1: 4, 3: 8}[len(self.slots(page, side))]


# ---------------------------------------------------------------------------------------------------------- attention
@dataclass
class Basis:
    """``q_forward``, ``v_back`` [H, D, D], ``mean_v`` [H, D], ``kappa`` [H, 3, 3], q.k's factor, cap, sinks [Hq].

    For the spread: a row's ``variance`` [2, 3] in units of its squared stored step, and whether errors are ``aligned``.
    """

    q_forward: np.ndarray
    v_back: np.ndarray
    mean_v: np.ndarray
    kappa: np.ndarray
    scaling: float
    softcap: float = 0.0
    sinks: np.ndarray | None = None
    variance: np.ndarray | None = None
    aligned: bool = True


def attend(q, stored, basis, chunk=None):
    """Attention of the last T tokens, SPEC 5: ``[B, T, Hq, D]``, two log-sum-exps ``[B, Hq, T]``, spread ``[.., 3]``.

    With ``chunk`` (k, v ``[B, H, T, D]``) the T tokens see each other through those rows instead of their pages.
    """
    parts = [_attend_sequence(q[b], stored, b, basis, chunk) for b in range(q.shape[0])]
    return tuple(np.stack(x) for x in zip(*parts))


def _attend_sequence(q, stored, b, basis, chunk):
    n_q, tokens, dim = q.shape
    h = stored.n_heads
    length = int(stored.lengths[b])
    position = np.arange(length - tokens, length)
    stored_end = length - tokens if chunk is not None else length
    q = q.astype(np.float64).reshape(h, n_q // h, tokens, dim) * basis.scaling
    q_packed = q @ basis.q_forward[:, None]
    logits, values, packed, error_k, error_v = [], [], [], [], []

    def add(x, v, is_packed, seen, w=0.0, b=0.0):
        if basis.softcap:
            x = np.tanh(x / basis.softcap) * basis.softcap
            w = w * (1 - (x / basis.softcap) ** 2) ** 2
        error_k.append(np.broadcast_to(w, x.shape))
        error_v.append(np.broadcast_to(b, x.shape))
        logits.append(np.where(seen, x, -np.inf))
        values.append(v)
        packed.append(np.full(x.shape[-1], is_packed))

    for page in stored.page_ids[b]:
        if page < 0:
            continue
        start, rows, tier = (int(x) for x in stored.table[page, :3])
        n = min(rows, stored_end - start)
        if n <= 0:
            continue
        slot = int(stored.table[page, 10])
        in_window = (start < stored.sink) | (start >= position // PAGE * PAGE - stored.recent)
        exactly = np.full(tokens, True) if tier == 0 else in_window & (slot >= 0)
        causal = start + np.arange(n) <= position[:, None]
        if (exactly[:, None] & causal).any():
            k, v = stored.exact[slot][:, :, :n]
            add(_dot(q, k), v, False, exactly[:, None] & causal)
        if (~exactly[:, None] & causal).any():
            (k, step), (v, _) = stored.read(page, 0), stored.read(page, 1)
            kappa = basis.kappa[:, {2: 0, 4: 1, 8: 2}[tier], {2: 0, 4: 1, 8: 2}[stored.bits_read(page, 0)]]
            noise = (kappa[:, None] * step**2)[:, None, None, :n]
            x = _dot(q_packed, k[:, :n]) - (q_packed**2).sum(-1)[..., None] * noise / 2
            v = v[:, :n] @ basis.v_back.swapaxes(1, 2) + basis.mean_v[:, None]
            w = of_v = 0.0
            if basis.variance is not None:
                units = [basis.variance[s, {2: 0, 4: 1, 8: 2}[int(stored.table[page, 2 + s])]] for s in (0, 1)]
                of_k, of_v = (units[s] * stored.scale(page, s)[:, None, None, :n] ** 2 for s in (0, 1))
                along = _dot(q_packed, k[:, :n] - stored.center(page)) ** 2 / dim if basis.aligned else 0.0
                w = np.maximum((q_packed**2).sum(-1)[..., None] * of_k - along, 0)
            add(x, v, True, ~exactly[:, None] & causal, w, of_v)
    if chunk is not None:
        k, v = chunk[0][b].astype(np.float64), chunk[1][b].astype(np.float64)
        add(_dot(q, k), v, False, np.tri(tokens, dtype=bool))
    x, packed = np.concatenate(logits, -1), np.concatenate(packed)
    lse_packed = _lse(np.where(packed, x, -np.inf))
    if basis.sinks is not None:
        sink = np.broadcast_to(basis.sinks.reshape(h, -1, 1, 1), (*x.shape[:-1], 1))
        lse = _lse(np.concatenate([x, sink], -1))
    else:
        lse = _lse(x)
    p = np.exp(x - lse[..., None])
    out = p @ np.concatenate(values, 1)[:, None]
    w, b = np.concatenate(error_k, -1), np.concatenate(error_v, -1)
    spread = np.stack([(p * w).sum(-1), (p**2 * w).sum(-1), (p**2 * b).sum(-1)], -1).reshape(n_q, -1, 3)
    return out.reshape(n_q, tokens, dim).swapaxes(0, 1), lse_packed.reshape(n_q, -1), lse.reshape(n_q, -1), spread


def _dot(q, k):
    return q @ k[:, None].swapaxes(2, 3)


def _lse(x):
    peak = x.max(-1)
    safe = np.where(np.isfinite(peak), peak, 0.0)
    with np.errstate(divide="ignore"):
        return safe + np.log(np.exp(x - safe[..., None]).sum(-1))
