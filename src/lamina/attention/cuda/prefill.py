"""Attention of many query tokens on NVIDIA GPUs: launches the kernels of ``prefill.cu``."""

import ctypes
import itertools
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lamina.attention.cuda.gpu import KINDS, LOG2E, most_shared, objection, processors, readable
from lamina.attention.cuda.nvrtc import Module
from lamina.attention.cuda.tables import to_device
from lamina.attention.types import AttentionOutput, ReadBasis
from lamina.pages.view import StoreView

WARPS, TILE, LISTERS = 4, 64, 1024
"""Warps and rows of a block, and threads that list a sequence's pages, as in ``prefill.cu``."""

ENTRY_WORDS = 12
PAGES_A_SPLIT = 8
"""Least number of pages that are worth a share of their own."""
MOST_NUMBERS = 1 << 25
"""Numbers of queries, all heads together, up to which tokens are taken at once: bounds scratch memory."""
LONG = 256
"""Tokens of a row from which on torch attends from its chunk to itself."""


class _Packed(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "q", "records", "slabs", "entries", "counts", "lengths", "starts", "kappa", "out", "lse"
        )),
        *((name, ctypes.c_int) for name in (
            "width", "total", "first", "count", "splits", "sink", "recent"
        )),
        ("softcap", ctypes.c_float),
    )  # fmt: skip


class _Exact(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "rows", "k", "v")),
        *((name, ctypes.c_longlong * 2) for name in ("of_q", "of_k", "of_v")),
        *((name, ctypes.c_void_p) for name in ("entries", "counts", "lengths", "starts", "out", "lse")),
        *((name, ctypes.c_int) for name in ("width", "total", "first", "count", "sink", "recent")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


@dataclass(frozen=True)
class Geometry:
    """What the kernels are compiled for; the fields are the macros of ``prefill.cu``."""

    head_dim: int
    group: int
    n_kv_heads: int
    centered: bool
    record_bytes: int
    capped: bool
    kind: int

    def defines(self) -> dict[str, int]:
        """Macros."""
        return {
            "D": self.head_dim, "G": self.group, "HKV": self.n_kv_heads, "CENTERED": int(self.centered),
            "RECORD_BYTES": self.record_bytes, "CAPPED": int(self.capped), "KIND": self.kind,
        }  # fmt: skip

    @property
    def packed_bytes(self) -> int:
        """Shared memory of a block of ``lamina_packed``."""
        words = self.head_dim // 16
        queries = (1 if self.kind == 1 else 2) * 2048 * words
        codes = 4096 * -(-words // 4) + 64 * self.head_dim
        return queries + codes + 1024 * (words + (words | 4)) + 512 + 512 * WARPS + 5 * 256 + 16

    @property
    def exact_bytes(self) -> int:
        """Shared memory of a block of ``lamina_exact``."""
        sides, rows = (2, 32) if self.kind == 0 else (1, 64)
        return sides * self.head_dim * (128 + 4 * rows)


def why_not(q_bhtd: Tensor, view: StoreView) -> str | None:
    """Why the kernels cannot serve a call; None if they can."""
    dim, device = q_bhtd.shape[-1], q_bhtd.device
    reason = objection(device, view.exact.dtype, dim)
    if reason is not None:
        return reason
    if q_bhtd.dtype != view.exact.dtype:
        return f"rows are {view.exact.dtype}"
    geometry = Geometry(dim, 1, 1, True, 0, False, KINDS[view.exact.dtype])
    most = most_shared(device)
    if max(geometry.packed_bytes, geometry.exact_bytes) > most:
        return f"the GPU has {most} bytes of shared memory a block, too few for a head dimension of {dim}"
    return None


@cache
def _module(geometry: Geometry, device: torch.device) -> Module:
    return Module("prefill", geometry.defines(), device)


@dataclass(frozen=True)
class Group:
    """Rows of a batch whose chunks are attended from in one launch.

    Attributes
    ----------
    rows, tokens : slice
        Rows of the batch, and their tokens, which lie behind each other.
    starts : Tensor
        int32 ``[rows + 1]`` on the device: where each row's tokens start, counted from the first row's.
    most : int
        Tokens of a row, at most.
    long : bool
        Whether the rows have many tokens, as many each.
    fresh : bool
        Whether no token is stored before them.
    """

    rows: slice
    tokens: slice
    starts: Tensor
    most: int
    long: bool
    fresh: bool


def group_rows(
    counts: list[int], n_heads: int, head_dim: int, device: torch.device, fresh: list[bool] | None = None
) -> list[Group]:
    """Groups of rows with so many query tokens each; scratch memory is bounded unless one row alone is too long.

    Parameters
    ----------
    counts : list of int
        Query tokens of each row.
    n_heads, head_dim : int
        Query heads and head dimension.
    device : torch.device
        Where the queries are.
    fresh : list of bool, optional
        Which rows have no token stored before these; default none, as far as is known.
    """
    fresh = fresh or [False] * len(counts)
    most = _most_tokens(n_heads, head_dim)
    groups: list[Group] = []
    row = token = 0
    while row < len(counts):
        long, end, total = counts[row] >= LONG, row, 0
        while end < len(counts) and (end == row or total + counts[end] <= most):
            alike = counts[end] == counts[row] if long else counts[end] < LONG
            if not alike or fresh[end] != fresh[row]:
                break
            total, end = total + counts[end], end + 1
        starts = torch.tensor([0, *itertools.accumulate(counts[row:end])], dtype=torch.int32)
        at = slice(row, end), slice(token, token + total)
        groups.append(Group(*at, to_device(starts, device), max(counts[row:end]), long, fresh[row]))
        row, token = end, token + total
    return groups


def _most_tokens(n_heads: int, head_dim: int) -> int:
    """Query tokens that are taken at once."""
    return max(TILE, MOST_NUMBERS // (n_heads * head_dim))


def attend_prefill(
    q_bhtd: Tensor, view: StoreView, basis: ReadBasis, chunk: tuple[Tensor, Tensor], splits: int | None = None
) -> AttentionOutput:
    """Attend from the last T tokens of each sequence; what :func:`why_not` has no objection to.

    Parameters
    ----------
    q_bhtd : Tensor
        ``[B, Hq, T, D]`` on a GPU, after RoPE.
    view : StoreView
        Pages, the T tokens included; table, page ids and lengths are copied to the GPU unless they are there.
    basis : ReadBasis
        How packed rows are read; sink logits are left to :meth:`AttentionOutput.with_sinks`; there is no spread.
    chunk : (Tensor, Tensor)
        Rows ``[B, H, T, D]`` of these T tokens.
    splits : int, optional
        Shares that the pages of a sequence are cut into; chosen to fill the GPU unless told.
    """
    batch, n_q, tokens, dim = q_bhtd.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_bhtd, *chunk))
    groups = group_rows([tokens] * batch, n_q, dim, q.device)
    out, lse_packed, lse = attend_groups(q, view, basis, (k, v), groups, splits)
    lse_packed, lse = (x.unflatten(1, (batch, tokens)).transpose(0, 1) for x in (lse_packed, lse))
    return AttentionOutput(out.unflatten(0, (batch, tokens)), lse_packed, lse)


def attend_groups(
    q: Tensor, view: StoreView, basis: ReadBasis, chunk: tuple[Tensor, Tensor], groups: list[Group],
    splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attend from the last tokens of each sequence, as many as it happens to have.

    Parameters
    ----------
    q : Tensor
        ``[n, Hq, D]``: tokens of one row behind those of the other.
    view, basis, splits
        As of :func:`attend_prefill`.
    chunk : (Tensor, Tensor)
        Rows ``[n, H, D]`` of these tokens.
    groups : list of Group
        From :func:`group_rows`.

    Returns
    -------
    out, lse_packed, lse : Tensor
        ``[n, Hq, D]`` in q's dtype, and float32 ``[Hq, n]``.
    """
    (n, n_q, dim), view = q.shape, view.to(q.device)
    q, k, v = (readable(x, 4 * x.itemsize).transpose(0, 1) for x in (q, *chunk))
    out = torch.empty(n, n_q, dim, dtype=q.dtype, device=q.device)
    lse_packed, lse = (torch.empty(n_q, n, dtype=torch.float32, device=q.device) for _ in range(2))
    for group in groups:
        at = group.tokens
        call = _Call(q[:, at], k[:, at], v[:, at], view, basis, group, splits)
        each = _most_tokens(n_q, dim) if call.batch == 1 else group.most
        for start in range(0, group.most, each):
            where, parts = call.attend(start, min(group.most - start, each))
            merged, lse[:, where] = _merge(parts)
            out[where] = merged.transpose(0, 1)
            lse_packed[:, where] = float("-inf") if group.fresh else parts[0][1]
    return out, lse_packed, lse


class _Call:
    """Launches over the tokens of a group, ``[heads, tokens, D]``; makes the lists of pages that they share."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, view: StoreView, basis: ReadBasis, group: Group, splits: int | None
    ) -> None:
        at, view = group.rows, view.rows(group.rows)
        self.q, self.k, self.v, self.view, self.basis, self.group, self.splits = q, k, v, view, basis, group, splits
        (self.n_q, self.tokens, self.dim), self.batch = q.shape, at.stop - at.start
        self.n_kv, self.device, self.width = view.layout.n_heads, q.device, view.page_ids.shape[1]
        self.geometry = Geometry(
            self.dim, self.n_q // self.n_kv, self.n_kv, view.layout.centered, view.layout.record_bytes,
            basis.softcap != 0, KINDS[q.dtype],
        )  # fmt: skip
        self.kernels = _module(self.geometry, q.device)
        flash = group.long and q.device.type == "cuda" and q.dtype != torch.float32 and not basis.softcap
        self.own = self._flash() if flash else None
        if group.fresh and self.own is not None:
            return
        self.entries, self.exact_entries, self.counts = (
            torch.empty(self.batch, *shape, dtype=torch.int32, device=q.device)
            for shape in ((self.width, ENTRY_WORDS), (self.width, 4), (2,))
        )
        self.kernels.launch(
            "lamina_list", (self.batch, 1, 1), LISTERS, view.table, view.page_ids, view.lengths, group.starts,
            self.width, view.window.sink, view.window.recent, self.entries, self.exact_entries, self.counts,
        )  # fmt: skip

    def attend(self, first: int, count: int) -> tuple[slice, list[tuple[Tensor, Tensor]]]:
        """From tokens ``[first, first + count)`` of every row, which are all unless it is one: where, and parts."""
        inside = slice(0, self.tokens) if self.batch > 1 else slice(first, first + count)
        parts = []
        if not self.group.fresh:
            parts.append(self._packed(inside, first, count))
        if not self.group.fresh or self.own is None:
            parts.append(self._exact(inside, first, count))
        if self.own is not None:
            parts.append((self.own[0][:, inside], self.own[1][:, inside]))
        before = self.group.tokens.start
        return slice(before + inside.start, before + inside.stop), parts

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=self.device)

    def _grid(self, count: int, splits: int = 1) -> tuple[int, int, int]:
        return -(-count * self.geometry.group // TILE) * splits, self.n_kv, self.batch

    def _shares(self, count: int) -> int:
        if self.splits is not None:
            return self.splits
        slots = processors(self.device) * (3 if self.dim <= 128 else 2)
        return max(1, min(slots // math.prod(self._grid(count)), self.width // PAGES_A_SPLIT))

    def _packed(self, at: slice, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Packed rows: values ``[Hq, tokens, D]`` in the engine's basis, and log-sum-exp ``[Hq, tokens]``."""
        view, basis, splits, total = self.view, self.basis, self._shares(count), at.stop - at.start
        q = self.q[:, at].float().reshape(self.n_kv, -1, self.dim)
        turned_q = q @ (basis.q_forward * (basis.scaling * LOG2E))
        out, lse = (self._empty(splits, self.n_q, total, *d) for d in ((self.dim,), ()))
        held = (
            turned_q, view.records, view.slabs, self.entries, self.counts, view.lengths, self.group.starts, basis.kappa,
            out, lse,
        )  # fmt: skip
        params = _Packed(
            *(t.data_ptr() for t in held), self.width, total, first, count, splits, view.window.sink,
            view.window.recent, basis.softcap * LOG2E,
        )  # fmt: skip
        grid = self._grid(count, splits)
        self.kernels.launch("lamina_packed", grid, 32 * WARPS, params, shared=self.geometry.packed_bytes)
        values, lse = (out[0], lse[0]) if splits == 1 else _merge(list(zip(out, lse)))
        values = values.view(self.n_kv, -1, self.dim) @ basis.v_back.mT
        return values.add_(basis.mean_v[:, None]).view(self.n_q, total, self.dim), lse

    def _exact(self, at: slice, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Exact rows, those of the chunk too unless torch attends to them: as :meth:`_packed`."""
        view, basis, q, k, v, total = self.view, self.basis, self.q, self.k, self.v, at.stop - at.start
        out, lse = (self._empty(self.n_q, total, *d) for d in ((self.dim,), ()))
        strides = ((ctypes.c_longlong * 2)(*x.stride()[:2]) for x in (q, k, v))
        own = None if self.own is not None else k.data_ptr()
        held = self.exact_entries, self.counts, view.lengths, self.group.starts, out, lse
        params = _Exact(
            q.data_ptr(), view.exact.data_ptr(), own, v.data_ptr(), *strides, *(t.data_ptr() for t in held), self.width,
            total, first, count, view.window.sink, view.window.recent, basis.scaling * LOG2E, basis.softcap * LOG2E,
        )  # fmt: skip
        shared = self.geometry.exact_bytes
        self.kernels.launch("lamina_exact", self._grid(count), 32 * WARPS, params, shared=shared)
        return out, lse

    def _flash(self) -> tuple[Tensor, Tensor]:
        """Causal attention of the chunks to themselves by torch: values ``[Hq, n, D]``, log-sum-exp ``[Hq, n]``."""
        q, k, v = (x.unflatten(1, (self.batch, -1)).transpose(0, 1) for x in (self.q, self.k, self.v))
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True, False, scale=self.basis.scaling
        )  # fmt: skip
        lse = found[1][..., : q.shape[2]]
        return found[0].transpose(0, 1).flatten(1, 2), lse.transpose(0, 1).flatten(1, 2)


def _merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge values ``[Hq, n, D]``, in place of the first, by log-sum-exps ``[Hq, n]``, -inf without any."""
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([x for _, x in parts]).logsumexp(0)
    base = lse.clamp(min=torch.finfo(torch.float32).min)
    values = parts[0][0].mul_((parts[0][1] - base).exp()[..., None])
    for more, of in parts[1:]:
        values.addcmul_(more, (of - base).exp()[..., None])
    return values, lse
