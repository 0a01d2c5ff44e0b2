"""What the controller is told of a step: measured once it is over, from the queries that its attention has kept."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lamina.attention.cuda.decode import kept_queries, queries_size
from lamina.attention.dispatch import attend
from lamina.attention.types import AttentionOutput, ReadBasis
from lamina.basis.encoder import PageEncoder
from lamina.codec import PAGE_TOKENS
from lamina.codec.gaussian import gaussian_rows
from lamina.control.canary import anchored_mean
from lamina.control.config import Canary
from lamina.control.live import RING_TOKENS, LiveControl, ring_mean
from lamina.engines.vllm.pages import BlockPages
from lamina.pages.table import EXACT
from lamina.pages.view import StoreView


@dataclass(frozen=True)
class Decoding:
    """A step in which every request decodes: what it read, and how many query tokens each has."""

    page_ids: Tensor
    lengths: Tensor
    tokens: int


class StepCanary:
    """Measures steps between them, so that nothing of it is in a CUDA graph.

    Parameters
    ----------
    control : LiveControl
        Asks and decides.
    pages : BlockPages
        What steps read.
    bases, encoders : list
        One a layer.
    n_queries : int
        Query heads.
    most : int
        Requests of a step, at most.
    tokens : int
        Query tokens of a request that decodes.
    window : WindowConfig
        Exact windows.
    """

    def __init__(
        self, control: LiveControl, pages: BlockPages, bases: list[ReadBasis], encoders: list[PageEncoder],
        n_queries: int, most: int, tokens: int, window: object,
    ) -> None:  # fmt: skip
        self.control, self.pages, self.bases, self.encoders = control, pages, bases, encoders
        self.n_queries, self.window = n_queries, window
        self.fires = False
        self.decoding: Decoding | None = None
        layout, self.kept = pages.layout, [torch.empty(0)] * pages.n_layers
        if pages.device.type == "cuda":
            size = most * queries_size(n_queries // layout.n_heads, tokens, layout.n_heads, layout.head_dim)
            with torch.inference_mode(False):
                self.kept = list(torch.zeros(pages.n_layers, size, device=pages.device))
        self._undecided: tuple[Tensor, int, torch.cuda.Event | None] | None = None
        self._context = 0

    def begin_step(self, tokens: int | None, context: int) -> None:
        """Say what the step will be: query tokens of every request if all decode, and the longest request."""
        index = self.control.layers[0]
        self.fires = tokens is not None and self.control.looks(index, tokens)
        self.decoding, self._context = None, context

    def end_step(self) -> None:
        """Decide from the step before the last one that was measured, and measure the last."""
        self.flush()
        if self.fires and self.decoding is not None:
            found = self._measure(self.decoding)
            event = None
            if found.device.type == "cuda":
                found, event = found.to("cpu", non_blocking=True), torch.cuda.Event()
                event.record()
            self._undecided = found, self._context, event
        self.fires = False

    def flush(self) -> None:
        """Take the decision that the last measurement is for."""
        if self._undecided is not None:
            found, context, event = self._undecided
            self._undecided = None
            if event is not None:
                event.synchronize()
            self.control.decide(found, context)

    def _measure(self, step: Decoding) -> Tensor:
        """Signals by layer, float32 ``[L, 2, 3]``."""
        if self.control.controller.config.canary == Canary.RING:
            return torch.stack([self._ring(step, layer) for layer in range(self.pages.n_layers)])
        found = [self._attend(step, layer) for layer in range(self.pages.n_layers)]
        q, out, spread, packed = (
            torch.stack(x)
            for x in zip(*((q[:, :, 0], r.out[:, -1], r.spread[:, :, -1], r.lse_packed[:, :, -1]) for q, r in found))  # type: ignore[index]
        )
        rows = gaussian_rows(self.encoders[0].codec, self.pages.layout.head_dim)
        return anchored_mean(q, out, spread, packed, rows)

    def _newest(self, step: Decoding, layer: int) -> Tensor:
        """Newest query of every request, ``[B, Hq, 1, D]``."""
        kept, layout, exact = self.kept[layer], self.pages.layout, self.pages.exact
        if kept.device.type == "cuda":
            shape = len(step.lengths), self.n_queries, step.tokens, layout.head_dim
            kept = kept_queries(kept, shape, layout.n_heads, self.bases[layer].scaling, exact.dtype)
        return kept[:, :, -1:]

    def _view(self, step: Decoding, layer: int) -> StoreView:
        return self.pages.view(layer, step.page_ids, step.lengths, self.window)

    def _attend(self, step: Decoding, layer: int) -> tuple[Tensor, AttentionOutput]:
        rows = gaussian_rows(self.encoders[layer].codec, self.pages.layout.head_dim)
        basis, q, view = replace(self.bases[layer], rows=rows), self._newest(step, layer), self._view(step, layer)
        return q, attend(q, view, basis, (q, q))

    def _ring(self, step: Decoding, layer: int) -> Tensor:
        """The ring canary's signals from the last keys, which are exact; ``[2, 3]``."""
        ids, lengths, keys = step.page_ids.cpu(), step.lengths.tolist(), []
        for row, length in zip(ids, lengths):
            first = max(length - RING_TOKENS, 0)
            slots = self.pages.table[0, row[first // PAGE_TOKENS : -(-length // PAGE_TOKENS)].long(), EXACT].long()
            there = bool((slots >= 0).all()) and length > 0
            k = self.pages.exact[layer, slots.to(self.pages.device), 0].transpose(0, 1).flatten(1, 2) if there else None
            start = first // PAGE_TOKENS * PAGE_TOKENS
            keys.append(None if k is None else k[:, first - start : length - start])
        return ring_mean(self._newest(step, layer), keys, self.encoders[layer], self.bases[layer]).cpu()
