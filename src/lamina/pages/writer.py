"""Full pages -> codes in the arena."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lamina.codec import PAGE_TOKENS, EncodedPages
from lamina.pages.arena import Arena

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
        views = arena.layout.views(arena.pages.data[0])
        encoded = self.encoder.encode(k, v, *bits)
        for side, e in enumerate(encoded):
            views.base[ids, side] = e.slabs[0]
            views.scale[ids, side], views.mid[ids, side], views.gain[ids, side] = e.scale, e.mid, e.gain
            for column, slab in zip((side, 2 + 2 * side, 3 + 2 * side), e.slabs[1:]):
                arena.slabs.data[0][slots[:, column]] = slab
            if views.center is not None and views.center_scale is not None and e.center is not None:
                views.center[ids], views.center_scale[ids] = e.center, e.center_scale  # type: ignore[assignment]
        arena.loss[ids] = self.encoder.shed_loss(*(e.truncation_mse for e in encoded))


def by_page(rows: Tensor) -> Tensor:
    """Rows of whole pages, ``[H, 64 n, D]`` -> ``[n, H, 64, D]``, a view."""
    return rows.unflatten(1, (-1, PAGE_TOKENS)).transpose(0, 1)
