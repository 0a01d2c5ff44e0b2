"""EchoKV as published, simulated: a ring canary and a threshold pick each layer's bits, in plain per-token groups."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lamina.basis.profile import Profile
from lamina.control.config import ControllerConfig
from lamina.control.live import RING_TOKENS
from lamina.control.state import UNQUANTISED, Controller
from lamina.eval.simulate import Packed, Rows, SimulatedCache, fake_quantise
from lamina.pages import WindowConfig

GROUP = 32
ECHO = ControllerConfig(canary="ring", policy="threshold", tau_rule="sqrt", tied=True, tau0=0.022, tau_context=4096)  # type: ignore[arg-type]
NO_WINDOW = WindowConfig(sink=0, recent=0, rollback=64)


@dataclass
class EchoRows(Rows):
    """One sequence of one layer; every row is coded as it comes.

    Attributes
    ----------
    tier : callable
        Bits that new rows get.
    bits : Tensor
        int64 ``[n]``: bits that each row got.
    """

    tier: Callable[[], int]
    bits: Tensor

    def extended(self, k: Tensor, v: Tensor) -> "EchoRows":
        """With more rows, at the bits in force."""
        tier = self.tier()
        (k_exact, v_exact), (k_coded, v_coded) = self.exact, self.coded
        return replace(
            self,
            exact=(torch.cat([k_exact, k], 1), torch.cat([v_exact, v], 1)),
            coded=(torch.cat([k_coded, grouped(k, tier)], 1), torch.cat([v_coded, grouped(v, tier)], 1)),
            bits=torch.cat([self.bits, torch.full((k.shape[1],), tier)]),
        )

    def cropped(self, length: int) -> "EchoRows":
        """The first rows."""
        (k, v), (k_coded, v_coded) = self.exact, self.coded
        return replace(
            self,
            exact=(k[:, :length], v[:, :length]),
            coded=(k_coded[:, :length], v_coded[:, :length]),
            bits=self.bits[:length],
        )

    def exactly(self, position: Tensor, window: WindowConfig) -> Tensor:
        """No row: there are no windows."""
        return torch.zeros(1, self.length, dtype=torch.bool, device=position.device)

    def packed(self, window: WindowConfig) -> Packed:
        """Codes with a 16-bit scale and zero a group, or 16 bits."""
        if not self.length:
            return Packed(0, UNQUANTISED, 0)
        coded = (self.bits < UNQUANTISED).float()
        return Packed(self.length, float(self.bits.float().mean()), float(coded.mean()) * 32 / group_of(self.exact[0]))

    def requantise_page(self, k: Tensor, bits: int) -> Tensor:
        """Keys ``[H, n, D]`` as the ring canary compares them."""
        return grouped(k, bits)

    def last_keys(self, tokens: int) -> Tensor:
        """Keys before quantisation, ``[H, n, D]``."""
        return self.exact[0][:, -tokens:]


class EchoCache(SimulatedCache):
    """Simulated EchoKV cache.

    Parameters
    ----------
    model, profile
        The model, and any profile of it: its bases are not used.
    controller : Controller, optional
        That of an earlier request.
    """

    def __init__(self, model: PreTrainedModel, profile: Profile, controller: Controller | None = None) -> None:
        controller = controller or echo_controller(profile)
        super().__init__(model, profile.with_transform("identity"), window=NO_WINDOW, controller=controller)

    @property
    def average_tier(self) -> float:
        """Bits of all rows without scales."""
        bits = [s.bits.float().mean() for s, _ in self._rows() if s.length]
        return float(torch.stack(bits).mean()) if bits else float("nan")

    def memory(self) -> dict[str, int]:
        """Bytes that a real cache would take, among them the ring of 16-bit keys that the canary reads."""
        ring = sum(min(s.length, RING_TOKENS) * n // 2 * 2 for s, n in self._rows())
        return {**super().memory(), "ring": ring}

    def empty_rows(self, index: int, none: Tensor) -> Any:
        """Rows of a new sequence."""
        weak, nothing = weakref.proxy(self), (none.float(), none.float())
        return EchoRows((none, none), nothing, lambda: weak.tiers[index][0], torch.empty(0, dtype=torch.long))


def echo_controller(profile: Profile, config: ControllerConfig = ECHO) -> Controller:
    """A controller that leaves rows as they are until it has fired."""
    sizes = [float(layer.n_kv_heads * layer.head_dim) for layer in profile.packed.values()]
    return Controller(config, [(UNQUANTISED, UNQUANTISED)] * len(sizes), sizes)


def grouped(x: Tensor, bits: int) -> Tensor:
    """Rows ``[..., D]`` as asymmetric codes of 32 channels return them; 16 bits are left as they are."""
    if bits >= UNQUANTISED:
        return x.float()
    return fake_quantise(x.float().unflatten(-1, (-1, group_of(x))), -1, bits).flatten(-2)


def group_of(x: Tensor) -> int:
    """Channels of a group: 32, or all of a head that is no multiple of it."""
    dim = x.shape[-1]
    return GROUP if dim % GROUP == 0 else dim
