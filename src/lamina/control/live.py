"""The controller at work in a cache: measures a layer where it was told to fire, and decides when all have been."""

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from lamina.attention.types import AttentionOutput, ReadBasis
from lamina.basis.encoder import PageEncoder
from lamina.codec import TIERS
from lamina.control.canary import Signals, anchored_mean, ring
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
        self.found: dict[int, Tensor] = {}
        self.on_firing: Callable[[Firing], Any] | None = None

    def looks(self, index: int, tokens: int) -> bool:
        """Whether a call of ``tokens`` query tokens is one that the controller measures; asked once a layer."""
        if index == self.layers[0]:
            self.found = {}
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
        config = self.controller.config
        if config.canary == Canary.RING:
            keys = [_last_keys(store, b) for b in range(len(store.sequences))]
            self.found[index] = ring_mean(query, keys, encoder, basis)
        elif result.spread is not None and basis.rows is not None:
            self.found[index] = anchored_mean(
                query[:, :, -1], result.out[:, -1], result.spread[:, :, -1], result.lse_packed[:, :, -1], basis.rows
            )
        if index == self.layers[-1]:
            found = torch.full((len(self.layers), 2, len(TIERS)), float("nan"))
            for i, layer in enumerate(self.layers):
                if layer in self.found:
                    found[i] = self.found[layer]
            self.decide(found, max(s.length for s in store.sequences))

    def decide(self, found: Tensor, context: int) -> None:
        """Decide from the signals of all layers, float32 ``[layers, 2, 3]``, those that are not finite left out.

        ``context``: the longest running sequence, in tokens.
        """
        self.firing = False
        signals = {
            i: Signals(*(dict(zip(TIERS, side)) for side in sides))
            for i, sides in enumerate(found.tolist())
            if all(isfinite(x) for side in sides for x in side)
        }
        firing = self.controller.decide(signals, context)
        if firing is not None and self.on_firing is not None:
            self.on_firing(firing)


def _last_keys(store: LayerStore, b: int) -> Tensor | None:
    """Last exact keys of a sequence; None where too few are left, as under a byte limit: none would seem to drift."""
    keys = store.last_keys(b, RING_TOKENS)
    return keys if keys.shape[1] >= min(RING_TOKENS, store.sequences[b].length) else None


def ring_mean(query: Tensor, keys: list[Tensor | None], encoder: PageEncoder, basis: ReadBasis) -> Tensor:
    """The ring canary's signals, averaged over heads and sequences, float32 ``[2, 3]``; NaN without any.

    Parameters
    ----------
    query : Tensor
        ``[B, Hq, T, D]``; the newest token of every row counts.
    keys : list of Tensor or None
        ``[H, n, D]`` a sequence, the last n keys.
    encoder, basis
        The layer's.
    """
    found = []
    for q, last in zip(query[:, :, -1], keys):
        if last is None or not bool(q.any()):
            continue
        drift = ring(q, last, scaling=basis.scaling, quantise=encoder.requantise_page)
        values = torch.stack([drift[bits].mean() for bits in TIERS])
        if bool(values.isfinite().all()):
            found.append(values)
    if not found:
        return torch.full((2, len(TIERS)), float("nan"))
    return torch.stack(found).mean(0).expand(2, -1)
