"""Whole pages -> codes on NVIDIA GPUs: launches the kernel of ``encode.cu``."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from lamina.attention.cuda.gpu import KINDS, most_shared, processors, readable
from lamina.attention.cuda.nvrtc import Module
from lamina.attention.cuda.tables import to_device
from lamina.basis.encoder import PageEncoder
from lamina.codec import PAGE_TOKENS
from lamina.codec.rows import ScaleRule
from lamina.pages.arena import Arena
from lamina.pages.writer import FilledPages

WARPS, GROUPS = 4, 2
"""Warps of a page and pages that a block has at a time, as in ``encode.cu``."""
JOB_WORDS = 19
SOURCE, HEAD_STEP, ROW_STEP, RECORD = slice(0, 2), slice(2, 4), slice(4, 6), 6
BITS, SLOTS, OF_LAYER = slice(7, 9), slice(9, 15), slice(15, 19)
"""64-bit words of a job, as in ``encode.cu``; those of one kind have K's and V's."""
RULES = {ScaleRule.MINMAX: 0, ScaleRule.CLIP: 1, ScaleRule.UNBIASED: 2}


@dataclass(frozen=True)
class Geometry:
    """What the kernel is compiled for; the fields are the macros of ``encode.cu``."""

    head_dim: int
    n_kv_heads: int
    centered: bool
    kind: int
    rule: int
    staged: bool

    def defines(self) -> dict[str, int]:
        """Macros."""
        return {
            "D": self.head_dim, "HKV": self.n_kv_heads, "CENTERED": int(self.centered), "KIND": self.kind,
            "RULE": self.rule, "STAGED": int(self.staged),
        }  # fmt: skip

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor holds."""
        return 2 if self.head_dim <= 128 else 1

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: sums over a page's rows, the matrix, and rows on their way."""
        sums = 4 * GROUPS * WARPS * (3 * self.head_dim + 2 * 9)
        matrix = 2 * self.head_dim**2 if self.staged else 0
        copied = GROUPS * PAGE_TOKENS * (2 * self.head_dim + 16) if matrix and self.kind != KINDS[torch.float32] else 0
        return -(-sums // 16) * 16 + matrix + copied


@cache
def _module(geometry: Geometry, device: torch.device) -> Module:
    return Module("encode", geometry.defines(), device)


def operands(matrices: Tensor) -> Tensor:
    """Matrices ``[H, D, D]`` in the order in which the kernel multiplies rows with them.

    Returns
    -------
    Tensor
        bfloat16 ``[H, D/16, D/16, 32, 2, 4]``: for 16 channels of a row and twice 8 of the result, four numbers each of
        a lane.
    """
    dim = matrices.shape[-1]
    lane = torch.arange(32, device=matrices.device)
    r, c = lane // 4, lane % 4
    # Channels of a row: lane c has 16 k + 2 c + {0, 1, 8, 9}.
    four = torch.tensor([0, 1, 8, 9]).to(c)
    row = 16 * torch.arange(dim // 16, device=matrices.device)[:, None, None] + 2 * c[:, None] + four
    # Channels of the result: number 2 t + e of lane c' is p D/4 + c' D/16 + j, as c' and e make up the tile's column r.
    number = 2 * torch.arange(dim // 8, device=matrices.device)[:, None] + r % 2
    each = dim // 16
    column = number // each * (dim // 4) + r // 2 * each + number % each
    chosen = matrices[:, row[:, None], column[None, :, :, None]]
    return chosen.bfloat16().unflatten(2, (dim // 16, 2)).transpose(3, 4).contiguous()


class CudaPageWriter:
    """Closes pages with one launch; what :func:`lamina.attention.cuda.gpu.objection` lets pass.

    Parameters
    ----------
    encoder : PageEncoder
        Bases and codec of the layer.
    dtype : torch.dtype
        Of the engine's rows.
    """

    def __init__(self, encoder: PageEncoder, dtype: torch.dtype) -> None:
        self.encoder, self.dtype = encoder, dtype
        codec, dim = encoder.codec, encoder.k_forward.shape[-1]
        shape = dim, len(encoder.k_forward), codec.center, KINDS[dtype], RULES[codec.rule]
        staged = Geometry(*shape, staged=True)
        fits = staged.shared_bytes <= most_shared(encoder.k_forward.device)
        self.geometry = staged if fits else Geometry(*shape, staged=False)
        _module(self.geometry, encoder.k_forward.device)
        self.clips = [min(int(ratio * dim), dim - 1) for ratio in (codec.clip_k, codec.clip_v)]
        self.matrices = operands(encoder.k_forward), operands(encoder.v_forward)
        self.waiting: list[_Waiting] | None = None
        self.shift = (encoder.mean_v[:, None] @ encoder.v_forward)[:, 0].contiguous()

    def write(self, arena: Arena, filled: list[FilledPages], bits: tuple[int, int]) -> None:
        """Close these pages at a tier, and write their codes and predicted losses."""
        pages = [page for one in filled for page in one.pages]
        slots = arena.close(pages, bits)
        kept = [(one.pages, readable(one.k, 16), readable(one.v, 16)) for one in filled]
        jobs = torch.cat([self.jobs(arena, *one) for one in kept])
        jobs[:, BITS] = torch.tensor(bits)
        jobs[:, SLOTS] = slots
        one = _Waiting(self, arena, pages, jobs, kept)
        if self.waiting is None:
            _encode([one])
        else:
            self.waiting.append(one)

    def jobs(self, arena: Arena, pages: list[int], k: Tensor, v: Tensor) -> Tensor:
        """What the kernel is told of pages and their rows ``[n, H, 64, D]``, valid until a pool grows.

        Returns
        -------
        Tensor
            int64 ``[n, JOB_WORDS]`` on the CPU: addresses of the rows of K and V, strides in numbers between their
            heads and between their rows, address of the page's record, bits of K and V, slots of the slabs beyond the
            base, addresses of the layer's slabs, matrices and shift. Bits and slots are left 0.
        """
        jobs = torch.zeros(len(pages), JOB_WORDS, dtype=torch.int64)
        for side, rows in enumerate((k, v)):
            jobs[:, side] = rows.data_ptr() + rows.stride(0) * rows.itemsize * torch.arange(len(pages))
            jobs[:, 2 + side], jobs[:, 4 + side] = rows.stride(1), rows.stride(2)
        records = arena.pages.data[0]
        jobs[:, RECORD] = records.data_ptr() + torch.tensor(pages) * records.stride(0)
        jobs[:, OF_LAYER] = self.of_layer(arena.slabs.data[0])
        return jobs

    def of_layer(self, slabs: Tensor) -> Tensor:
        """Last words of all jobs of a layer whose slabs lie there, int64 ``[4]``."""
        return torch.tensor([t.data_ptr() for t in (slabs, *self.matrices, self.shift)])

    def launch(self, jobs: Tensor) -> Tensor:
        """Encode pages of one or more layers of this geometry, from :meth:`jobs`, on the device.

        Returns
        -------
        Tensor
            float32 ``[n, 2, H, 2]``: :attr:`lamina.codec.EncodedPages.truncation_mse` of K and V.
        """
        device, heads = self.shift.device, self.geometry.n_kv_heads
        truncation = torch.empty(len(jobs), 2, heads, 2, dtype=torch.float32, device=device)
        most = max(1, processors(device) * self.geometry.blocks // (2 * heads))
        shares = min(-(-len(jobs) // GROUPS), most)
        _module(self.geometry, device).launch(
            "lamina_encode", (shares, heads, 2), 32 * WARPS * GROUPS, jobs, len(jobs), *self.clips, truncation,
            shared=self.geometry.shared_bytes,
        )  # fmt: skip
        return truncation


@dataclass(frozen=True)
class _Waiting:
    """Pages that are to be encoded, and what has to stay until they are."""

    writer: CudaPageWriter
    arena: Arena
    pages: list[int]
    jobs: Tensor
    rows: Any


@contextmanager
def encoded_together(writers: list[CudaPageWriter]) -> Iterator[None]:
    """Have pages that these writers close encoded at the end, those of all layers alike in one launch."""
    waiting: list[_Waiting] = []
    for writer in writers:
        writer.waiting = waiting
    try:
        yield
    finally:
        for writer in writers:
            writer.waiting = None
        _encode(waiting)


def _encode(waiting: list[_Waiting]) -> None:
    for kind in dict.fromkeys((x.writer.geometry, *x.writer.clips) for x in waiting):
        alike = [x for x in waiting if (x.writer.geometry, *x.writer.clips) == kind]
        jobs = torch.cat([x.jobs for x in alike])
        truncation = alike[0].writer.launch(to_device(jobs, alike[0].arena.device))
        for x, of_layer in zip(alike, truncation.split([len(x.pages) for x in alike])):
            x.arena.predict_loss(x.pages, partial(x.writer.encoder.shed_loss, of_layer[:, 0], of_layer[:, 1]))
