"""The controller at work in a cache: measures a layer where it was told to fire, and decides when all have been."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lamina.attention.types import AttentionOutput, ReadBasis
from lamina.basis.encoder import PageEncoder
from lamina.codec import TIERS
from lamina.control.canary import Signals, anchored, ring
from lamina.control.config import Canary
from lamina.control.state import Controller, Firing
from lamina.pages import LayerStore

RING_TOKENS = 64
DECODE_TOKENS = 32
"""Query tokens up to which a call counts as decoding, drafts included; longer ones are prompts."""


class LiveControl:
    """Connects a controller with the layers of one cache.

    Parameters
    ----------
    controller : Controller
        May be shared by caches that follow each other: its state persists across requests.
    layers : list of int
        The packed layers, in the order in which they run.

    Attributes
    ----------
    decode_tokens : int
        Query tokens up to which a call counts as that many decode steps.
    on_firing : callable, optional
        Called with every decision.
    """

    def __init__(self, controller: Controller, layers: list[int]) -> None:
        self.controller = controller
        self.layers = layers
        self.decode_tokens = DECODE_TOKENS
        self.firing = False
        self.signals: dict[int, Signals] = {}
        self.on_firing: Callable[[Firing], Any] | None = None

    def looks(self, index: int, tokens: int) -> bool:
        """Whether a call of ``tokens`` query tokens is one that the controller measures; asked once a layer."""
        if index == self.layers[0]:
            self.signals = {}
            self.firing = tokens <= self.decode_tokens and self.controller.fires(tokens)
        return self.firing

    @property
    def wants_spread(self) -> bool:
        """Whether attention has to sum up its spread where the controller looks."""
        return self.controller.config.canary == Canary.ANCHORED

    def attended(
        self, index: int, query: Tensor, store: LayerStore, encoder: PageEncoder, basis: ReadBasis,
        result: AttentionOutput,
    ) -> None:  # fmt: skip
        """Take in what attention of one layer found where the controller looks; after the last layer, decide.

        Parameters
        ----------
        index : int
            The layer.
        query, result : Tensor, AttentionOutput
            ``[B, Hq, T, D]``; the newest token of every row counts.
        store, encoder, basis
            The layer's.
        """
        found = [self._one(query[b, :, -1], b, store, encoder, basis, result) for b in range(len(query))]
        kept = [s for s in found if s is not None and all(bool(x.isfinite().all()) for d in s for x in d.values())]
        if kept:
            self.signals[self.layers.index(index)] = Signals(
                *({bits: _mean(s[side][bits] for s in kept) for bits in TIERS} for side in (0, 1))
            )
        if index == self.layers[-1]:
            self.firing = False
            firing = self.controller.decide(self.signals, max(s.length for s in store.sequences))
            if firing is not None and self.on_firing is not None:
                self.on_firing(firing)

    def _one(
        self, q: Tensor, b: int, store: LayerStore, encoder: PageEncoder, basis: ReadBasis, result: AttentionOutput
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]] | None:
        if not bool(q.any()):
            return None
        if self.controller.config.canary == Canary.RING:
            keys = store.last_keys(b, RING_TOKENS)
            # Under a byte limit fewer may be left, which would say that nothing drifts.
            if keys.shape[1] < min(RING_TOKENS, store.sequences[b].length):
                return None
            k = ring(q, keys, scaling=basis.scaling, quantise=encoder.requantise_page)
            return k, k
        if result.spread is None or basis.rows is None or bool((result.lse_packed[b, :, -1] == float("-inf")).all()):
            return None
        return anchored(result.spread[b, :, -1], result.out[b, -1], basis.rows)


def _mean(values: Any) -> float:
    return float(torch.stack([v.mean() for v in values]).mean())
