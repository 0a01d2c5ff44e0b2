"""A step's rows into pages, and full pages into codes: of all layers at once between steps, layer by layer in one."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lamina.attention.cuda.encode import (
    BITS,
    HEAD_STEP,
    JOB_WORDS,
    OF_LAYER,
    RECORD,
    ROW_STEP,
    SLOTS,
    SOURCE,
    CudaPageWriter,
)  # fmt: skip
from lamina.attention.cuda.gpu import readable
from lamina.attention.cuda.rows import write_rows
from lamina.attention.cuda.tables import to_device
from lamina.basis.encoder import PageEncoder
from lamina.codec import PAGE_TOKENS
from lamina.engines.vllm.pages import BlockPages
from lamina.pages.table import EXACT, FINE
from lamina.pages.view import StoreView
from lamina.pages.writer import put_codes

Tiers = Sequence[tuple[int, int]]
"""Bits of K and V, one pair a layer."""


class Closer(Protocol):
    """Writes rows and codes; the books say already which pages are closed, and what slots they have.

    Attributes
    ----------
    damaged : Tensor
        int32 ``[1]``: how many numbers were NaN or Inf.
    """

    damaged: Tensor

    def now(self, pages: list[int], tiers: Tiers) -> None:
        """Encode pages from their exact rows, in all layers."""

    def plan(self, pages: list[int], tiers: Tiers) -> None:
        """Have the next :meth:`write` of every layer encode pages, which are full once its rows are there."""

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor, view: StoreView) -> None:
        """Write rows ``[n, H, D]`` to slots int64 ``[n]`` (64 page + row), and encode the pages planned."""


class TorchCloser:
    """On the CPU."""

    def __init__(self, pages: BlockPages, encoders: list[PageEncoder]) -> None:
        self.pages, self.encoders = pages, encoders
        self.damaged = torch.zeros(1, dtype=torch.int32)
        self._planned: tuple[list[int], Tiers] = [], []

    def now(self, pages: list[int], tiers: Tiers) -> None:
        """Encode pages from their exact rows, in all layers."""
        for layer in range(self.pages.n_layers):
            rows = [self.pages.exact[layer, self.pages.exact_slot(p)] for p in pages]
            self._encode(layer, pages, rows, tiers[layer])

    def plan(self, pages: list[int], tiers: Tiers) -> None:
        """Have the next :meth:`write` of every layer encode pages."""
        self._planned = pages, tiers

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor, view: StoreView) -> None:
        """Write rows and encode the pages planned."""
        both = torch.stack([k, v], 1)
        self.damaged += (~torch.isfinite(both)).sum().int()
        page, row = slots // PAGE_TOKENS, slots % PAGE_TOKENS
        slot = view.table[page, EXACT].long()
        kept = slot >= 0
        view.exact[slot[kept], :, :, row[kept]] = both[kept]
        pages, tiers = self._planned
        if not pages:
            return
        first = {int(page[i]): int(i) for i in (row == 0).nonzero()[:, 0]}

        def rows_of(p: int) -> Tensor:
            if (exact := self.pages.exact_slot(p)) >= 0:
                return view.exact[exact]
            return both[first[p] : first[p] + PAGE_TOKENS].permute(1, 2, 0, 3)

        self._encode(layer, pages, [rows_of(p) for p in pages], tiers[layer])

    def _encode(self, layer: int, pages: list[int], rows: list[Tensor], bits: tuple[int, int]) -> None:
        books, encoder = self.pages, self.encoders[layer]
        both, ids = torch.stack(rows), torch.tensor(pages)
        encoded = encoder.encode(both[:, 0], both[:, 1], *bits)
        slots = books.table[layer, ids, FINE:EXACT].long()
        put_codes(books.layout, books.records[layer], books.slabs, ids, slots, encoded)
        books.loss[layer, ids] = encoder.shed_loss(*(e.truncation_mse for e in encoded))


class CudaCloser:
    """On NVIDIA GPUs, without waiting for them."""

    def __init__(self, pages: BlockPages, encoders: list[PageEncoder], dtype: torch.dtype) -> None:
        self.pages = pages
        # All stay: jobs know where their matrices are.
        self.writers = [CudaPageWriter(encoder, dtype) for encoder in encoders]
        layout, exact = pages.layout, pages.exact
        self._jobs = torch.zeros(pages.n_layers, 1, JOB_WORDS, dtype=torch.int64)
        self._jobs[..., HEAD_STEP], self._jobs[..., ROW_STEP] = PAGE_TOKENS * layout.head_dim, layout.head_dim
        self._jobs[:, 0, OF_LAYER] = torch.stack([writer.of_layer(pages.slabs) for writer in self.writers])
        self._records = torch.tensor([r.data_ptr() for r in pages.records])[:, None]
        self._exact = torch.tensor([x.data_ptr() for x in exact])[:, None]
        # Losses are means over heads.
        weights = torch.stack([torch.stack([e.logit_weight, e.value_weight]) for e in encoders])
        self._weights = (weights / layout.n_heads)[:, None, :, :, None]
        with torch.inference_mode(False):
            self.damaged = torch.zeros(1, dtype=torch.int32, device=pages.device)
            self._none = torch.zeros(pages.n_layers, 0, JOB_WORDS, dtype=torch.int64, device=pages.device)
        self._planned: tuple[Tensor, Tensor | None] = self._none, None

    def now(self, pages: list[int], tiers: Tiers) -> None:
        """Encode pages from their exact rows, in all layers, in one launch."""
        jobs, ids = self._upload(pages, tiers)
        found = self.writers[0].launch(jobs.flatten(0, 1)).unflatten(0, jobs.shape[:2])
        if ids is not None:
            self.pages.loss[:, ids] = (found * self._weights).sum(3)

    def plan(self, pages: list[int], tiers: Tiers) -> None:
        """Have the next :meth:`write` of every layer encode pages."""
        self._planned = self._upload(pages, tiers) if pages else (self._none, None)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor, view: StoreView) -> None:
        """Write rows and encode the pages planned."""
        jobs, ids = self._planned[0][layer], self._planned[1]
        k, v = readable(k, 16), readable(v, 16)
        write_rows(k, v, slots, view, jobs, self.damaged)
        if not len(jobs):
            return
        found = self.writers[0].launch(jobs)
        if ids is not None:
            self.pages.loss[layer, ids] = (found * self._weights[layer]).sum(2)

    def _upload(self, pages: list[int], tiers: Tiers) -> tuple[Tensor, Tensor | None]:
        """Jobs of pages on the device, and the pages if any of them has planes that may be dropped."""
        device, has_planes = self.pages.device, max(max(pair) for pair in tiers) > 2
        ids = to_device(torch.tensor(pages), device) if has_planes else None
        return to_device(self._jobs_of(pages, tiers), device), ids

    def _jobs_of(self, pages: list[int], tiers: Tiers) -> Tensor:
        """Jobs of pages in all layers, int64 ``[L, n, JOB_WORDS]``; without rows where there are no exact ones."""
        books = self.pages
        cells, ids = books.table[:, pages].long(), torch.tensor(pages)
        jobs = self._jobs.repeat(1, len(pages), 1)
        size, slots = books.exact.itemsize, cells[..., EXACT]
        rows = self._exact + slots * (books.exact.stride(1) * size)
        sides = torch.arange(2) * (books.exact.stride(2) * size)
        jobs[..., SOURCE] = torch.where(slots[..., None] >= 0, rows[..., None] + sides, 0)
        jobs[..., RECORD] = self._records + ids * books.layout.record_bytes
        jobs[..., BITS] = torch.tensor(tiers)[:, None]
        jobs[..., SLOTS] = cells[..., FINE:EXACT]
        return jobs


def closer_of(pages: BlockPages, encoders: list[PageEncoder], dtype: torch.dtype) -> Closer:
    """What writes these pages."""
    return TorchCloser(pages, encoders) if pages.device.type == "cpu" else CudaCloser(pages, encoders, dtype)
