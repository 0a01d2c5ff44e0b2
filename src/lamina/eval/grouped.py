"""Quantisation groups smaller than a head, simulated: several scales a row, in any orthogonal or stretched basis."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lamina.basis.profile import Profile
from lamina.codec import PAGE_TOKENS, CodecConfig
from lamina.codec.rows import dequantise_rows, quantise_rows
from lamina.errors import ConfigError
from lamina.eval.kivi import KiviRows
from lamina.eval.simulate import Packed, SimulatedCache
from lamina.pages import WindowConfig

SCALE_BITS = 32
"""Bits of a group's scale and midpoint."""

Coder = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class GroupedRows(KiviRows):
    """One sequence of one layer; full pages are coded, with Lamina's windows.

    Attributes
    ----------
    coder : callable
        Rows of K and V ``[H, n, D]`` as they came -> as they are read, in the engine's basis.
    bits : (float, float)
        Bits an element that codes and scales would take.
    """

    coder: Coder
    bits: tuple[float, float]

    def extended(self, k: Tensor, v: Tensor) -> "GroupedRows":
        """With more rows, full pages coded."""
        k, v = (torch.cat([a, b], 1) for a, b in zip(self.exact, (k, v)))
        done, full = self.coded[0].shape[1], k.shape[1] // PAGE_TOKENS * PAGE_TOKENS
        k_new, v_new = self.coder(k[:, done:full].float(), v[:, done:full].float())
        k_coded, v_coded = self.coded
        return replace(self, exact=(k, v), coded=(torch.cat([k_coded, k_new], 1), torch.cat([v_coded, v_new], 1)))

    def cropped(self, length: int) -> "GroupedRows":
        """The first rows; a page that is cut is exact again."""
        cut = KiviRows.cropped(self, length)
        return replace(self, exact=cut.exact, coded=cut.coded)

    def packed(self, window: WindowConfig) -> Packed:
        """Codes with a 16-bit scale and midpoint a group."""
        return Packed(super().packed(window).tokens, *self.bits)


class GroupedCache(SimulatedCache):
    """Simulated cache with groups of ``group`` channels in the basis of a profile.

    Raises
    ------
    ConfigError
        The head dimension is no multiple of the group, or the codec has page centers, which groups do not have.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        profile: Profile,
        window: WindowConfig,
        codec: CodecConfig,
        tiers: tuple[int, int],
        group: int,
    ) -> None:
        dims = {layer.head_dim for layer in profile.packed.values()}
        if any(dim % group for dim in dims):
            raise ConfigError(f"groups of {group} channels do not divide heads of {sorted(dims)}")
        if codec.center or codec.mass_correction:
            raise ConfigError("grouped codes are simulated without page centers and mass correction")
        super().__init__(model, profile, window=window, codec=codec, tiers=tiers)
        self.bits_of, self.group = tiers, group

    @property
    def average_tier(self) -> float:
        """Bits of codes alone."""
        return sum(self.bits_of) / 2

    def empty_rows(self, index: int, none: Tensor) -> Any:
        """Rows of a new sequence."""
        return GroupedRows(
            (none, none), (none.float(), none.float()), self._coder(index, none.device),
            (self.average_tier, SCALE_BITS / self.group),
        )  # fmt: skip

    def _coder(self, index: int, device: torch.device) -> Coder:
        layer = self.profile.packed[index]
        t, codec, group = layer.stored, self.codec, self.group
        k_forward, q_forward, v_forward, v_back = (
            x.to(device) for x in (t.k_forward, t.q_forward, t.v_forward, t.v_back)
        )
        mean = t.mean_v.to(device)[:, None]

        def coded(x: Tensor, bits: int, clip: float) -> Tensor:
            groups = x.unflatten(-1, (x.shape[-1] // group, group))
            return dequantise_rows(*quantise_rows(groups, bits, codec.rule, clip), bits).flatten(-2)

        def code(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            bits_k, bits_v = self.bits_of
            return (
                coded(k @ k_forward, bits_k, codec.clip_k) @ q_forward.mT,
                coded((v - mean) @ v_forward, bits_v, codec.clip_v) @ v_back.mT + mean,
            )

        return code
