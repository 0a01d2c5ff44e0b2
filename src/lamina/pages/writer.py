"""Full pages -> codes in the arena."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lamina.codec import PAGE_TOKENS, EncodedPages
from lamina.pages.arena import Arena
from lamina.pages.layout import RecordLayout

BATCH = 64
"""Pages that are encoded at a time, which bounds the scratch memory."""


@dataclass(frozen=True)
class FilledPages:
    """Pages and their rows, K and V ``[n, H, 64, D]``."""

    pages: list[int]
    k: Tensor
    v: Tensor


class PageWriter(Protocol):
    """Encodes full pages into an arena."""

    def write(self, arena: Arena, filled: list[FilledPages], bits: tuple[int, int]) -> None:
        """Close these pages at a tier, and write their codes and predicted losses."""


class Encoder(Protocol):
    """What an :class:`EncodingWriter` encodes with, see :class:`lamina.basis.encoder.PageEncoder`."""

    def encode(self, k: Tensor, v: Tensor, bits_k: int, bits_v: int) -> tuple[EncodedPages, EncodedPages]:
        """Encode whole pages."""

    def shed_loss(self, truncation_k: Tensor, truncation_v: Tensor) -> Tensor:
        """Predict what dropping planes costs."""


class EncodingWriter:
    """Writes what an encoder returns, on any device."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder

    def write(self, arena: Arena, filled: list[FilledPages], bits: tuple[int, int]) -> None:
        """Close these pages at a tier, and write their codes and predicted losses."""
        pages = [page for one in filled for page in one.pages]
        k, v = [x for one in filled for x in one.k], [x for one in filled for x in one.v]
        for i in range(0, len(pages), BATCH):
            at = slice(i, i + BATCH)
            self._write(arena, pages[at], torch.stack(k[at]), torch.stack(v[at]), bits)

    def _write(self, arena: Arena, pages: list[int], k: Tensor, v: Tensor, bits: tuple[int, int]) -> None:
        slots = arena.close(pages, bits).long()
        ids = torch.tensor(pages)
        encoded = self.encoder.encode(k, v, *bits)
        put_codes(arena.layout, arena.pages.data[0], arena.slabs.data[0], ids, slots, encoded)
        arena.loss[ids] = self.encoder.shed_loss(*(e.truncation_mse for e in encoded))


def put_codes(
    layout: RecordLayout, records: Tensor, slabs: Tensor, pages: Tensor, slots: Tensor,
    encoded: tuple[EncodedPages, EncodedPages],
) -> None:  # fmt: skip
    """Write what K and V of pages were encoded to into their records, and into slots ``[n, 6]`` of their slabs."""
    views = layout.views(records)
    for side, e in enumerate(encoded):
        views.base[pages, side] = e.slabs[0]
        views.scale[pages, side], views.mid[pages, side], views.gain[pages, side] = e.scale, e.mid, e.gain
        for column, slab in zip((side, 2 + 2 * side, 3 + 2 * side), e.slabs[1:]):
            slabs[slots[:, column]] = slab
        if views.center is not None and views.center_scale is not None and e.center is not None:
            views.center[pages], views.center_scale[pages] = e.center, e.center_scale  # type: ignore[assignment]


def by_page(rows: Tensor) -> Tensor:
    """Rows of whole pages, ``[H, 64 n, D]`` -> ``[n, H, 64, D]``, a view."""
    return rows.unflatten(1, (-1, PAGE_TOKENS)).transpose(0, 1)
