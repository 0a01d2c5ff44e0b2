"""Decode attention on NVIDIA GPUs: launches the kernels of ``decode.cu``."""

import ctypes
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lamina.attention.cuda.gpu import KINDS, LOG2E, objection, processors
from lamina.attention.cuda.nvrtc import Module
from lamina.attention.types import AttentionOutput, ReadBasis
from lamina.codec import PAGE_TOKENS
from lamina.pages.view import StoreView

WARPS, SLOTS = 4, 4
"""Warps a block and slots of a warp's ring, as in ``decode.cu``."""

PAGES_AHEAD = 32
"""Pages that a warp looks up at a time."""

COLUMNS_PER_TILE = 4
MOST_TILES = 4
MOST_QUERIES = MOST_TILES * COLUMNS_PER_TILE
"""Query tokens times heads a KV head that the kernels take."""
EXACT_COST = 12
"""Packed pages that take as long as an exact one, about."""
MOST_APART = 4
"""Exact pages have blocks of their own where the GPU holds at least so many times as many blocks."""
MOST_WAVES = 4
"""Times that the grid may fill the GPU, which evens out sequences of different lengths."""


class _NewRows(ctypes.Structure):
    _fields_ = (
        ("k", ctypes.c_void_p), ("v", ctypes.c_void_p), ("strides", ctypes.c_longlong * 6),
        *((name, ctypes.c_void_p) for name in ("exact", "table", "page_ids", "lengths", "damaged")),
        *((name, ctypes.c_int) for name in ("width", "mark", "cut")),
    )  # fmt: skip


@dataclass(frozen=True)
class NewRows:
    """Rows of the query tokens that the kernels append to the sequences' open pages, which have room for them.

    Attributes
    ----------
    k, v : Tensor
        ``[B, H, T, D]``.
    damaged : Tensor
        int32 ``[1]``: becomes ``mark``, if that is more, where a row holds NaN or Inf.
    mark : int
        Tells the layer; 0: such numbers are counted instead.
    queries : Tensor, optional
        float32 ``[N]``, N being enough: is given the queries, see :func:`kept_queries`.
    """

    k: Tensor
    v: Tensor
    damaged: Tensor
    mark: int
    queries: Tensor | None = None


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "q", "q_meta", "q_exact", "records", "slabs", "exact", "table", "page_ids", "lengths", "kappa", "partial"
        )),
        *((name, ctypes.c_int) for name in (
            "width", "splits", "exact_splits", "exact_cost", "tokens", "sink", "recent", "packed_at", "cut"
        )),
        ("softcap", ctypes.c_float),
        ("variance", ctypes.c_float * 6),
        ("along", ctypes.c_float),
    )  # fmt: skip


@dataclass(frozen=True)
class Geometry:
    """What the kernels are compiled for; the fields are the macros of ``decode.cu``."""

    head_dim: int
    group: int
    tiles: int
    n_kv_heads: int
    centered: bool
    record_bytes: int
    capped: bool
    kind: int
    measured: bool

    @classmethod
    def of(cls, q_bhtd: Tensor, view: StoreView, basis: ReadBasis) -> "Geometry":
        """That of a call."""
        n_kv, (_, n_q, tokens, dim) = view.layout.n_heads, q_bhtd.shape
        group = n_q // n_kv
        return cls(
            dim, group, _tiles(group, tokens), n_kv, view.layout.centered,
            view.layout.record_bytes, basis.softcap != 0, KINDS[view.exact.dtype], basis.rows is not None,
        )  # fmt: skip

    def defines(self) -> dict[str, int]:
        """Macros."""
        values = {
            "D": self.head_dim, "G": self.group, "NT": self.tiles, "HKV": self.n_kv_heads, "CENTERED": self.centered,
            "RECORD_BYTES": self.record_bytes, "CAPPED": self.capped, "KIND": self.kind, "MEASURED": self.measured,
        }  # fmt: skip
        return {name: int(value) for name, value in values.items()}

    @property
    def columns(self) -> int:
        """Columns, one a query token and head, padded."""
        return self.tiles * COLUMNS_PER_TILE

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the warps' rings, or what the merge and exact rows take."""
        entry = 48 + 4 * self.columns
        ring = WARPS * (SLOTS * (16 * self.head_dim + 512) + PAGES_AHEAD * entry)
        merge = self.columns * (WARPS * (self.head_dim + 5) + WARPS * PAGE_TOKENS // 4 + self.head_dim)
        return max(ring, 4 * merge)

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor holds, as in ``decode.cu``."""
        work = self.tiles * -(-self.head_dim // 128)
        return 2 if work > 2 else 3 if work > 1 else 4

    @property
    def row_threads(self) -> int:
        """Threads that prepare a query or merge a result."""
        return (2 if self.head_dim > 128 else 4) * (-(-self.head_dim // 32) * 32)

    def splits(self, rows: int, pages: int, slots: int) -> int:
        """Shares of a sequence's pages: as few as leave few of so many slots idle with ``rows`` blocks a share."""
        most = max(1, min(-(-pages // (2 * WARPS)), MOST_WAVES * slots // rows))
        shares = [n * rows / (-(-n * rows // slots) * slots) for n in range(1, most + 1)]
        return 1 + next(i for i, share in enumerate(shares) if share >= 0.96 * max(shares))


def why_not(q_bhtd: Tensor, view: StoreView) -> str | None:
    """Why the kernels cannot serve a call; None if they can."""
    _, n_q, tokens, dim = q_bhtd.shape
    group = n_q // view.layout.n_heads
    reason = objection(q_bhtd.device, view.exact.dtype, dim)
    if reason is not None:
        return reason
    if q_bhtd.dtype != view.exact.dtype:
        return f"rows are {view.exact.dtype}"
    if group * tokens > MOST_QUERIES:
        return (
            f"{tokens} query tokens of {group} heads a KV head are more than the {MOST_QUERIES} columns of the kernels"
        )
    return None


@cache
def _module(geometry: Geometry, device: torch.device) -> Module:
    return Module("decode", geometry.defines(), device)


def attend_cuda(
    q_bhtd: Tensor, view: StoreView, basis: ReadBasis, splits: int | None = None, new: NewRows | None = None,
    out: Tensor | None = None,
) -> AttentionOutput:  # fmt: skip
    """Attend from the last T tokens of each sequence, a few at most; what :func:`why_not` has no objection to.

    Parameters
    ----------
    q_bhtd : Tensor
        ``[B, Hq, T, D]`` on a GPU, after RoPE.
    view : StoreView
        Pages, the T tokens included; table, page ids and lengths are copied to the GPU unless they are there.
    basis : ReadBasis
        How packed rows are read; sink logits are left to :meth:`AttentionOutput.with_sinks`.
    splits : int, optional
        Shares that the pages of a sequence are cut into; chosen to fill the GPU unless told.
    new : NewRows, optional
        Rows to append first; the lengths of the view count them already.
    out : Tensor, optional
        ``[B, T, Hq, D]`` of q's dtype, contiguous: where the result goes.
    """
    view = view.to(q_bhtd.device)
    geometry = Geometry.of(q_bhtd, view, basis)
    batch, n_q, tokens, dim = q_bhtd.shape
    n_kv, device, width, window = geometry.n_kv_heads, q_bhtd.device, view.page_ids.shape[1], view.window
    kernels, columns, rows = _module(geometry, device), geometry.columns, basis.rows
    # Exact pages are those of the windows and up to two open or cut ones; one a split is enough. They have blocks of
    # their own where those leave most of the GPU to packed pages, and else the first splits read them too.
    windows, rows_a_split = (window.sink + window.recent) // PAGE_TOKENS, batch * n_kv
    most_exact, slots = windows + 2, processors(device) * geometry.blocks
    exact_blocks = most_exact * rows_a_split
    apart = MOST_APART * exact_blocks <= slots
    if splits is None:
        splits = geometry.splits(rows_a_split, width, slots - apart * exact_blocks)
    exact_splits, exact_cost = min(splits, most_exact), EXACT_COST if windows else 0
    packed_at = exact_splits if apart else 0

    queries = transform_queries(q_bhtd, view, basis, new)
    partial = _empty(device, splits + exact_splits, batch, n_kv, columns, dim + 2 + 3 * geometry.measured)
    if out is None:
        out = _empty(device, batch, tokens, n_q, dim, dtype=q_bhtd.dtype)
    lse_packed, lse = _empty(device, 2, batch, n_q, tokens)
    spread = _empty(device, batch, n_q, tokens, 3) if rows is not None else None
    held = (
        *queries, view.records, view.slabs, view.exact, view.table, view.page_ids, view.lengths, basis.kappa, partial
    )  # fmt: skip
    variance = (0.0,) * 6 if rows is None else (*rows.variance[0], *rows.variance[1])
    params = _Params(
        *(t.data_ptr() for t in held), width, splits, exact_splits, exact_cost, tokens, window.sink,
        window.recent, packed_at, view.cut,
        basis.softcap * LOG2E, (ctypes.c_float * 6)(*variance), 1 / dim if rows is not None and rows.aligned else 0.0,
    )  # fmt: skip
    grid = (n_kv, packed_at + splits, batch)
    kernels.launch("lamina_decode", grid, 32 * WARPS, params, shared=geometry.shared_bytes, early=True)
    kernels.launch(
        "lamina_merge", (n_kv, batch, geometry.group * tokens), geometry.row_threads, partial, basis.v_back,
        basis.mean_v, view.page_ids, view.lengths, width, splits, exact_splits, tokens, batch, view.cut, out,
        lse_packed, lse, lse if spread is None else spread, shared=4 * (splits + exact_splits), early=True,
    )  # fmt: skip
    return AttentionOutput(out, lse_packed, lse, spread)


def transform_queries(
    q_bhtd: Tensor, view: StoreView, basis: ReadBasis, new: NewRows | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn queries into the packed basis, as 16-bit integers, and append new rows: the first of the three kernels.

    Returns
    -------
    packed, meta, exact : Tensor
        int8 ``[B, H, 2 columns, D]``, float32 ``[B, H, columns, 4]`` and ``[B, H, columns, D]``, see ``decode.cu``.
    """
    geometry, device = Geometry.of(q_bhtd, view, basis), q_bhtd.device
    (batch, _, tokens, dim), n_kv, columns = q_bhtd.shape, geometry.n_kv_heads, geometry.columns
    packed = _empty(device, batch, n_kv, 2 * columns, dim, dtype=torch.int8)
    meta = _empty(device, batch, n_kv, columns, 4)
    if new is None or new.queries is None:
        exact = _empty(device, batch, n_kv, columns, dim)
    else:
        exact = _queries(new.queries, batch, n_kv, columns, dim)
    q_bhtd = q_bhtd if q_bhtd.stride(-1) == 1 else q_bhtd.contiguous()
    rows_in = _NewRows()
    if new is not None:
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (new.k, new.v))
        rows_in = _NewRows(
            k.data_ptr(), v.data_ptr(), (ctypes.c_longlong * 6)(*k.stride()[:3], *v.stride()[:3]),
            *(t.data_ptr() for t in (view.exact, view.table, view.page_ids, view.lengths, new.damaged)),
            view.page_ids.shape[1], new.mark, view.cut,
        )  # fmt: skip
    _module(geometry, device).launch(
        "lamina_query", (n_kv, batch, 1 if new is None else 2), geometry.row_threads, q_bhtd,
        *(ctypes.c_longlong(x) for x in q_bhtd.stride()[:3]), basis.q_forward, basis.scaling * LOG2E, tokens,
        packed, meta, exact, rows_in, early=True,
    )  # fmt: skip
    return packed, meta, exact


def kept_queries(
    kept: Tensor, shape: tuple[int, int, int, int], n_kv_heads: int, scaling: float, dtype: torch.dtype
) -> Tensor:
    """Queries of a shape ``[B, Hq, T, D]`` that :attr:`NewRows.queries` was given."""
    batch, n_q, tokens, dim = shape
    group = n_q // n_kv_heads
    found = _queries(kept, batch, n_kv_heads, COLUMNS_PER_TILE * _tiles(group, tokens), dim)
    by_head = found[:, :, : group * tokens].unflatten(2, (tokens, group)).transpose(2, 3)
    return (by_head / (scaling * LOG2E)).reshape(shape).to(dtype)


def queries_size(group: int, tokens: int, n_kv_heads: int, dim: int) -> int:
    """Numbers that :attr:`NewRows.queries` must have for each sequence."""
    return COLUMNS_PER_TILE * _tiles(group, tokens) * n_kv_heads * dim


def _tiles(group: int, tokens: int) -> int:
    """Tiles of columns, one column a query token and head."""
    return -(-group * tokens // COLUMNS_PER_TILE)


def _queries(kept: Tensor, *shape: int) -> Tensor:
    return kept[: math.prod(shape)].view(shape)


def _empty(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
