"""Attention of many query tokens on NVIDIA GPUs: launches the kernels of ``prefill.cu``."""

import ctypes
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lamina.attention.cuda.gpu import KINDS, LOG2E, most_shared, objection, processors, readable
from lamina.attention.cuda.nvrtc import Module
from lamina.attention.types import AttentionOutput, ReadBasis
from lamina.pages.view import StoreView

WARPS, TILE, LISTERS = 4, 64, 1024
"""Warps and rows of a block, and threads that list a sequence's pages, as in ``prefill.cu``."""

ENTRY_WORDS = 12
PAGES_A_SPLIT = 8
"""Least number of pages that are worth a share of their own."""
MOST_NUMBERS = 1 << 25
"""Numbers of a query, all heads and sequences together, up to which tokens are taken at once: bounds scratch memory."""


class _Packed(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "q", "records", "slabs", "entries", "counts", "lengths", "kappa", "out", "lse"
        )),
        *((name, ctypes.c_int) for name in (
            "width", "tokens", "first", "count", "splits", "sink", "recent"
        )),
        ("softcap", ctypes.c_float),
    )  # fmt: skip


class _Exact(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "rows", "k", "v")),
        *((name, ctypes.c_longlong * 3) for name in ("of_q", "of_k", "of_v")),
        *((name, ctypes.c_void_p) for name in ("entries", "counts", "lengths", "out", "lse")),
        *((name, ctypes.c_int) for name in ("width", "tokens", "first", "count", "sink", "recent")),
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
    q, k, v = (readable(x, 4 * x.itemsize) for x in (q_bhtd, *chunk))
    call = _Call(q, view, basis, (k, v), splits)
    out = torch.empty(batch, tokens, n_q, dim, dtype=q.dtype, device=q.device)
    lse_packed, lse = (torch.empty(batch, n_q, tokens, dtype=torch.float32, device=q.device) for _ in range(2))
    own = _flash(q, k, v, basis.scaling) if call.flash else None
    each = max(TILE, MOST_NUMBERS // (batch * n_q * dim))
    for start in range(0, tokens, each):
        at = slice(start, min(tokens, start + each))
        parts = [call.packed(at.start, at.stop - start), call.exact(at.start, at.stop - start)]
        if own is not None:
            parts.append((own[0][:, :, at], own[1][:, :, at]))
        merged, lse[:, :, at] = _merge(parts)
        out[:, at], lse_packed[:, :, at] = merged.transpose(1, 2), parts[0][1]
    return AttentionOutput(out, lse_packed, lse)


class _Call:
    """Launches over some of a call's tokens; makes the lists of pages that they share."""

    def __init__(
        self, q: Tensor, view: StoreView, basis: ReadBasis, chunk: tuple[Tensor, Tensor], splits: int | None
    ) -> None:
        view = view.to(q.device)
        self.q, self.view, self.basis, self.chunk, self.splits = q, view, basis, chunk, splits
        self.batch, self.n_q, self.tokens, self.dim = q.shape
        self.n_kv, self.device, self.width = view.layout.n_heads, q.device, view.page_ids.shape[1]
        self.group = self.n_q // self.n_kv
        self.geometry = Geometry(
            self.dim, self.group, self.n_kv, view.layout.centered, view.layout.record_bytes, basis.softcap != 0,
            KINDS[q.dtype],
        )  # fmt: skip
        self.kernels = _module(self.geometry, q.device)
        self.flash = q.device.type == "cuda" and q.dtype != torch.float32 and not basis.softcap
        self.entries, self.exact_entries, self.counts = (
            torch.empty(self.batch, *shape, dtype=torch.int32, device=q.device)
            for shape in ((self.width, ENTRY_WORDS), (self.width, 4), (2,))
        )
        self.kernels.launch(
            "lamina_list", (self.batch, 1, 1), LISTERS, view.table, view.page_ids, view.lengths, self.width,
            self.tokens, view.window.sink, view.window.recent, self.entries, self.exact_entries, self.counts,
        )  # fmt: skip

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=self.device)

    def _grid(self, count: int, splits: int = 1) -> tuple[int, int, int]:
        return -(-count * self.group // TILE) * splits, self.n_kv, self.batch

    def _shares(self, count: int) -> int:
        if self.splits is not None:
            return self.splits
        slots = processors(self.device) * (3 if self.dim <= 128 else 2)
        return max(1, min(slots // math.prod(self._grid(count)), self.width // PAGES_A_SPLIT))

    def packed(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Packed rows: values ``[B, Hq, count, D]`` in the engine's basis, and log-sum-exp ``[B, Hq, count]``."""
        view, basis, splits = self.view, self.basis, self._shares(count)
        q = self.q[:, :, first : first + count].float().unflatten(1, (self.n_kv, self.group)).flatten(2, 3)
        turned_q = q @ (basis.q_forward * (basis.scaling * LOG2E))
        out, lse = (self._empty(splits, self.batch, self.n_q, count, *d) for d in ((self.dim,), ()))
        held = turned_q, view.records, view.slabs, self.entries, self.counts, view.lengths, basis.kappa, out, lse
        params = _Packed(
            *(t.data_ptr() for t in held), self.width, self.tokens, first, count, splits, view.window.sink,
            view.window.recent, basis.softcap * LOG2E,
        )  # fmt: skip
        grid = self._grid(count, splits)
        self.kernels.launch("lamina_packed", grid, 32 * WARPS, params, shared=self.geometry.packed_bytes)
        values, lse = (out[0], lse[0]) if splits == 1 else _merge(list(zip(out, lse)))
        values = values.view(self.batch, self.n_kv, -1, self.dim) @ basis.v_back.mT
        return values.add_(basis.mean_v[:, None]).view(self.batch, self.n_q, count, self.dim), lse

    def exact(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Exact rows, those of the chunk too unless torch attends to them: as :meth:`packed`."""
        view, basis, (k, v) = self.view, self.basis, self.chunk
        out, lse = (self._empty(self.batch, self.n_q, count, *d) for d in ((self.dim,), ()))
        strides = ((ctypes.c_longlong * 3)(*x.stride()[:3]) for x in (self.q, k, v))
        params = _Exact(
            self.q.data_ptr(), view.exact.data_ptr(), None if self.flash else k.data_ptr(), v.data_ptr(), *strides,
            *(t.data_ptr() for t in (self.exact_entries, self.counts, view.lengths, out, lse)), self.width,
            self.tokens, first, count, view.window.sink, view.window.recent, basis.scaling * LOG2E,
            basis.softcap * LOG2E,
        )  # fmt: skip
        shared = self.geometry.exact_bytes
        self.kernels.launch("lamina_exact", self._grid(count), 32 * WARPS, params, shared=shared)
        return out, lse


def _flash(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Causal attention of a chunk to itself by torch: values ``[B, Hq, T, D]``, log-sum-exp ``[B, Hq, T]``."""
    found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scaling)
    return found[0], found[1][..., : q.shape[2]]


def _merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge values ``[B, Hq, n, D]``, in place of the first, by log-sum-exps ``[B, Hq, n]``, -inf without any."""
    lse = torch.stack([x for _, x in parts]).logsumexp(0)
    base = lse.clamp(min=torch.finfo(torch.float32).min)
    values = parts[0][0].mul_((parts[0][1] - base).exp()[..., None])
    for more, of in parts[1:]:
        values.addcmul_(more, (of - base).exp()[..., None])
    return values, lse
