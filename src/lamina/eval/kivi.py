"""KIVI, simulated: K per channel over groups of 32 tokens, V per token, at 2 bits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lamina.basis.profile import Profile
from lamina.codec import PAGE_TOKENS
from lamina.eval.simulate import Packed, Rows, SimulatedCache, fake_quantise
from lamina.pages import WindowConfig

GROUP = 32


@dataclass
class KiviRows(Rows):
    """One sequence of one layer; full pages are coded."""

    def extended(self, k: Tensor, v: Tensor) -> "KiviRows":
        """With more rows, full pages coded."""
        k, v = (torch.cat([a, b], 1) for a, b in zip(self.exact, (k, v)))
        done, full = self.coded[0].shape[1], k.shape[1] // PAGE_TOKENS * PAGE_TOKENS
        groups = k[:, done:full].float().unflatten(1, ((full - done) // GROUP, GROUP))
        new = fake_quantise(groups, 2).flatten(1, 2), fake_quantise(v[:, done:full].float(), 2)
        return KiviRows((k, v), (torch.cat([self.coded[0], new[0]], 1), torch.cat([self.coded[1], new[1]], 1)))

    def cropped(self, length: int) -> "KiviRows":
        """The first rows; a page that is cut is exact again."""
        full = length // PAGE_TOKENS * PAGE_TOKENS
        k, v = self.exact
        return KiviRows((k[:, :length], v[:, :length]), (self.coded[0][:, :full], self.coded[1][:, :full]))

    def exactly(self, position: Tensor, window: WindowConfig) -> Tensor:
        """Lamina's windows."""
        start = torch.arange(self.coded[0].shape[1], device=position.device) // PAGE_TOKENS * PAGE_TOKENS
        return (start < window.sink) | (start >= position // PAGE_TOKENS * PAGE_TOKENS - window.recent)

    def packed(self, window: WindowConfig) -> Packed:
        """Codes and their 16-bit scales and zeros, K's a channel and 32 tokens, V's a token."""
        exact = min(self.length, window.sink + window.recent + self.length % PAGE_TOKENS)
        return Packed(self.length - exact, 2, (32 / GROUP + 32 / self.exact[0].shape[2]) / 2)


class KiviCache(SimulatedCache):
    """Simulated KIVI cache with Lamina's windows."""

    def __init__(self, model: PreTrainedModel, profile: Profile, window: WindowConfig) -> None:
        super().__init__(model, profile, window=window)

    @property
    def average_tier(self) -> float:
        """2 bits."""
        return 2.0

    def empty_rows(self, index: int, none: Tensor) -> Any:
        """Rows of a new sequence."""
        return KiviRows((none, none), (none.float(), none.float()))
