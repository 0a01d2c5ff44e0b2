"""Attention of many query tokens on NVIDIA GPUs: what of it goes to which kernel; launches those of ``prefill.cu``."""

import ctypes
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from lamina.attention.cuda.gpu import KINDS, LOG2E, most_shared, objection, processors, readable
from lamina.attention.cuda.nvrtc import Module
from lamina.attention.cuda.parts import TILE, Attended, Group, group_rows, merge, most_tokens
from lamina.attention.types import AttentionOutput, ReadBasis
from lamina.pages.view import StoreView

WARPS, LISTERS = 4, 1024
"""Warps of a block, which has ``TILE`` rows, and threads that list a sequence's pages, as in ``prefill.cu``."""

ENTRY_WORDS = 12
PAGES_A_SPLIT = 8
"""Least number of pages that are worth a share of their own."""
FILLED = 48
"""Blocks of ``TILE`` rows, one a token and query head, from which on pages become 16-bit rows for them."""
EXPANDED = FILLED * TILE
"""Tokens for which pages become 16-bit rows whatever the heads."""

logger = logging.getLogger("lamina")


Itself = Callable[[Tensor, Tensor, Tensor, Group, float, Tensor], Tensor]
"""Causal attention of a group's chunks to themselves: q, k, v ``[tokens, heads, D]``, the group, the scaling, and where
values go; returns float32 log-sum-exps ``[Hq, tokens]``."""


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
def _halves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether long chunks attend to themselves by a kernel for 16 bits."""
    return device.type == "cuda" and dtype != torch.float32


@cache
def _expands(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether pages can become 16-bit rows for long chunks; queries of float16 are finer than what reads those."""
    if device.type != "cuda" or dtype != torch.bfloat16 or dim & (dim - 1):
        return False
    if dim > 128 and most_shared(device) < 160 * 1024:
        return False
    if find_spec("triton") is None:
        logger.warning("attention: long chunks read packed planes, at half the speed: install triton")
        return False
    return True


@cache
def _module(geometry: Geometry, device: torch.device) -> Module:
    return Module("prefill", geometry.defines(), device)


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


def flash_attention(q: Tensor, k: Tensor, v: Tensor, group: Group, scaling: float, out: Tensor) -> Tensor:
    """Causal attention of chunks to themselves by torch; an :data:`Itself`."""
    batch = group.rows.stop - group.rows.start
    q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q, k, v))
    found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scaling)
    out.copy_(found[0].transpose(1, 2).flatten(0, 1))
    return found[1][..., : q.shape[2]].transpose(0, 1).flatten(1)


def attend_groups(
    q: Tensor, view: StoreView, basis: ReadBasis, chunk: tuple[Tensor, Tensor], groups: list[Group],
    splits: int | None = None, itself: Itself = flash_attention, out: Tensor | None = None,
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
    itself : callable
        Does attention of long chunks to themselves in 16 bits.
    out : Tensor, optional
        Where values go, contiguous ``[n, Hq, D]`` in q's dtype; made unless given.

    Returns
    -------
    out, lse_packed, lse : Tensor
        ``[n, Hq, D]`` in q's dtype, and float32 ``[Hq, n]``.
    """
    (n, n_q, dim), view = q.shape, view.to(q.device)
    q, k, v = (readable(x, 4 * x.itemsize).transpose(0, 1) for x in (q, *chunk))
    out = torch.empty(n, n_q, dim, dtype=q.dtype, device=q.device) if out is None else out
    lse_packed, lse = (torch.empty(n_q, n, dtype=torch.float32, device=q.device) for _ in range(2))
    for group in groups:
        at, to = group.tokens, Attended(out, lse, lse_packed).of(group.tokens)
        _Call(q[:, at], k[:, at], v[:, at], view, basis, group, splits).attend(to, itself)
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

    def attend(self, to: Attended, itself: Itself) -> None:
        """From all tokens; those of a single row maybe in several goes."""
        lse_own = None
        if self.group.long and _halves(self.device, self.q.dtype) and not self.basis.softcap:
            q, k, v = (x.transpose(0, 1) for x in (self.q, self.k, self.v))
            lse_own = itself(q, k, v, self.group, self.basis.scaling, to.out).contiguous()
            if self.group.fresh:
                to.lse.copy_(lse_own)
                to.lse_packed.fill_(float("-inf"))
                return
        self._list_pages()
        each = most_tokens(self.n_q, self.dim) if self.batch == 1 else self.group.most
        for first in range(0, self.group.most, each):
            count = min(self.group.most - first, each)
            at = slice(0, self.tokens) if self.batch > 1 else slice(first, first + count)
            self._attend(to.of(at), None if lse_own is None else lse_own[:, at], at, first, count)

    def _list_pages(self) -> None:
        view, self.entries = self.view, self._numbers(self.batch, self.width, ENTRY_WORDS)
        self.exact_entries, self.counts = self._numbers(self.batch, self.width, 4), self._numbers(self.batch, 2)
        self.kernels.launch(
            "lamina_list", (self.batch, 1, 1), LISTERS, view.table, view.page_ids, view.lengths, self.group.starts,
            self.width, view.window.sink, view.window.recent, self.entries, self.exact_entries, self.counts,
        )  # fmt: skip

    def _attend(self, to: Attended, lse_own: Tensor | None, at: slice, first: int, count: int) -> None:
        """From tokens ``[first, first + count)`` of every row, which are all unless it is one."""
        exact = self._exact(at, first, count, lse_own is None)
        if self._fills(count) and _expands(self.device, self.q.dtype, self.dim):
            return self._expanded(exact, lse_own, to, at, first)
        parts = [exact]
        if self.group.fresh:
            to.lse_packed.fill_(float("-inf"))
        else:
            parts.append(self._packed(at, first, count))
            to.lse_packed.copy_(parts[1][1])
        if lse_own is not None:
            parts.append((to.out.transpose(0, 1), lse_own))
        merged, lse = merge(parts)
        to.out.copy_(merged.transpose(0, 1))
        to.lse.copy_(lse)

    def _numbers(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=self.device)

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
        values, lse = (out[0], lse[0]) if splits == 1 else merge(list(zip(out, lse)))
        values = values.view(self.n_kv, -1, self.dim) @ basis.v_back.mT
        return values.add_(basis.mean_v[:, None]).view(self.n_q, total, self.dim), lse

    def _fills(self, count: int) -> bool:
        """Whether so many tokens of every row are worth making rows of what is stored before them."""
        return self.group.long and not self.group.fresh and math.prod(self._grid(count)) >= FILLED

    def _expanded(
        self, exact: tuple[Tensor, Tensor], lse_own: Tensor | None, to: Attended, at: slice, first: int
    ) -> None:
        """As 16-bit rows: packed ones, and all merged."""
        from lamina.attention.cuda.dense import attend_expanded

        pages, before = self.width, self.group.before
        if before is not None and not self.view.cut:
            pages = min(pages, -(-before // 64))
        q, listed = self.q[:, at].transpose(0, 1), (self.entries, self.counts)
        attend_expanded(q, self.view, self.basis, listed, exact, lse_own, to, self.group.most, first, pages)

    def _exact(self, at: slice, first: int, count: int, of_chunk: bool) -> tuple[Tensor, Tensor]:
        """Exact rows, those of the chunk too if told: as :meth:`_packed`."""
        view, basis, q, k, v, total = self.view, self.basis, self.q, self.k, self.v, at.stop - at.start
        out, lse = (self._empty(self.n_q, total, *d) for d in ((self.dim,), ()))
        strides = ((ctypes.c_longlong * 2)(*x.stride()[:2]) for x in (q, k, v))
        own = k.data_ptr() if of_chunk else None
        held = self.exact_entries, self.counts, view.lengths, self.group.starts, out, lse
        params = _Exact(
            q.data_ptr(), view.exact.data_ptr(), own, v.data_ptr(), *strides, *(t.data_ptr() for t in held), self.width,
            total, first, count, view.window.sink, view.window.recent, basis.scaling * LOG2E, basis.softcap * LOG2E,
        )  # fmt: skip
        shared = self.geometry.exact_bytes
        self.kernels.launch("lamina_exact", self._grid(count), 32 * WARPS, params, shared=shared)
        return out, lse
