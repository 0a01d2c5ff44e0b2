"""Whole pages -> codes on NVIDIA GPUs: launches the kernel of ``encode.cu``."""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from lamina.attention.cuda.decode import KINDS, OLDEST
from lamina.attention.cuda.nvrtc import Module
from lamina.basis.encoder import PageEncoder
from lamina.codec import PAGE_TOKENS
from lamina.codec.rows import ScaleRule
from lamina.pages.arena import Arena
from lamina.pages.writer import FilledPages

WARPS, GROUPS = 4, 2
"""Warps of a page and pages that a block has at a time, as in ``encode.cu``."""
STAGED_DIM = 128
"""Head dimension up to which a block has the matrix in shared memory, where the GPU has as much."""
MOST_DIM = 256
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
        matrix = 4 * self.head_dim**2 if self.staged else 0
        copied = GROUPS * PAGE_TOKENS * (2 * self.head_dim + 16) if matrix and self.kind != KINDS[torch.float32] else 0
        return -(-sums // 16) * 16 + matrix + copied


def why_not(encoder: PageEncoder, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot encode a layer's pages; None if it can."""
    device, dim = encoder.k_forward.device, encoder.k_forward.shape[-1]
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < OLDEST:
        return f"{device} is no NVIDIA GPU of compute capability 8.0 or newer"
    if dtype not in KINDS:
        return f"rows are {dtype}"
    if dim % 16 or dim > MOST_DIM:
        return f"the head dimension is {dim}; the kernel takes multiples of 16 up to {MOST_DIM}"
    return None


@cache
def _module(geometry: Geometry, device: torch.device) -> Module:
    return Module("encode", geometry.defines(), device)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _most_shared(device: torch.device) -> int:
    """Bytes of shared memory that a block may have."""
    # Left out by older versions of torch; what any such GPU has.
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 99 * 1024))


def operands(matrices: Tensor) -> Tensor:
    """Matrices ``[H, D, D]`` in the order in which the kernel multiplies rows with them.

    Returns
    -------
    Tensor
        bfloat16 ``[H, D/16, D/8, 32, 2, 4]``: for 16 channels of a row and 8 of the result, what each lane has: four
        numbers rounded, and what that leaves of them.
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
    high = chosen.bfloat16()
    return torch.stack([high, (chosen - high.float()).bfloat16()], -2).contiguous()


class CudaPageWriter:
    """Closes pages with one launch; what :func:`why_not` has no objection to.

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
        staged = Geometry(*shape, staged=dim <= STAGED_DIM)
        fits = staged.shared_bytes <= _most_shared(encoder.k_forward.device)
        self.geometry = staged if fits else Geometry(*shape, staged=False)
        self.clips = [min(int(ratio * dim), dim - 1) for ratio in (codec.clip_k, codec.clip_v)]
        self.matrices = operands(encoder.k_forward), operands(encoder.v_forward)
        self.queue: EncodeQueue | None = None
        self.shift = (encoder.mean_v[:, None] @ encoder.v_forward)[:, 0].contiguous()

    def write(self, arena: Arena, filled: list[FilledPages], bits: tuple[int, int]) -> None:
        """Close these pages at a tier, and write their codes and predicted losses."""
        pages = [page for one in filled for page in one.pages]
        slots = arena.close(pages, bits)
        kept = [(one.pages, _readable(one.k), _readable(one.v)) for one in filled]
        jobs = torch.cat([self.jobs(arena, *one) for one in kept])
        jobs[:, 7:9] = torch.tensor(bits)
        jobs[:, 9:15] = slots
        queue = self.queue or EncodeQueue([])
        queue.add(self, arena, pages, jobs, kept)
        if self.queue is None:
            queue.flush()

    def jobs(self, arena: Arena, pages: list[int], k: Tensor, v: Tensor) -> Tensor:
        """What the kernel is told of pages and their rows ``[n, H, 64, D]``, valid until a pool grows.

        Returns
        -------
        Tensor
            int64 ``[n, 20]`` on the CPU: addresses of the rows of K and V, strides in numbers between their heads and
            between their rows, page, bits of K and V, slots of the slabs beyond the base, addresses of the layer's
            records, slabs, matrices and shift. Bits and slots are left 0.
        """
        jobs = torch.zeros(len(pages), 20, dtype=torch.int64)
        for side, rows in enumerate((k, v)):
            jobs[:, side] = rows.data_ptr() + rows.stride(0) * rows.itemsize * torch.arange(len(pages))
            jobs[:, 2 + side], jobs[:, 4 + side] = rows.stride(1), rows.stride(2)
        jobs[:, 6] = torch.tensor(pages)
        of_layer = arena.pages.data[0], arena.slabs.data[0], *self.matrices, self.shift
        jobs[:, 15:20] = torch.tensor([t.data_ptr() for t in of_layer])
        return jobs

    def launch(self, jobs: Tensor) -> Tensor:
        """Encode pages of one or more layers of this geometry, from :meth:`jobs`, on the device.

        Returns
        -------
        Tensor
            float32 ``[n, 2, H, 2]``: :attr:`lamina.codec.EncodedPages.truncation_mse` of K and V.
        """
        device, heads = self.shift.device, self.geometry.n_kv_heads
        truncation = torch.empty(len(jobs), 2, heads, 2, dtype=torch.float32, device=device)
        most = max(1, _processors(device) * self.geometry.blocks // (2 * heads))
        shares = min(-(-len(jobs) // GROUPS), most)
        _module(self.geometry, device).launch(
            "lamina_encode", (shares, heads, 2), 32 * WARPS * GROUPS, jobs, len(jobs), *self.clips, truncation,
            shared=self.geometry.shared_bytes,
        )  # fmt: skip
        return truncation


class EncodeQueue:
    """While it is open, pages that writers of several layers close are gathered, then encoded in one launch a geometry.

    Parameters
    ----------
    writers : list of CudaPageWriter
        Those whose pages are to wait.
    """

    def __init__(self, writers: list[CudaPageWriter]) -> None:
        self.writers = writers
        self._waiting: list[tuple[CudaPageWriter, Arena, list[int], Tensor, Any]] = []

    def __enter__(self) -> "EncodeQueue":
        """Have the writers hand over their pages."""
        for writer in self.writers:
            writer.queue = self
        return self

    def __exit__(self, *_: object) -> None:
        """Encode what they have handed over."""
        for writer in self.writers:
            writer.queue = None
        self.flush()

    def add(self, writer: CudaPageWriter, arena: Arena, pages: list[int], jobs: Tensor, rows: Any) -> None:
        """Take jobs in; ``rows`` are kept until they are done."""
        self._waiting.append((writer, arena, pages, jobs, rows))

    def flush(self) -> None:
        """Encode everything that waits."""
        waiting, self._waiting = self._waiting, []
        for kind in dict.fromkeys((w.geometry, *w.clips) for w, *_ in waiting):
            alike = [one for one in waiting if (one[0].geometry, *one[0].clips) == kind]
            jobs = torch.cat([one[3] for one in alike])
            truncation = alike[0][0].launch(jobs.to(alike[0][1].device))
            for (writer, arena, pages, _, _), of_layer in zip(alike, truncation.split([len(one[2]) for one in alike])):
                arena.predict_loss(pages, partial(writer.encoder.shed_loss, of_layer[:, 0], of_layer[:, 1]))


def _readable(x: Tensor) -> Tensor:
    """Rows ``[n, H, 64, D]`` that can be read 16 bytes at a time."""
    aligned = x.stride(3) == 1 and x.data_ptr() % 16 == 0 and not any(n * x.itemsize % 16 for n in x.stride()[:3])
    return x if aligned else x.contiguous()
