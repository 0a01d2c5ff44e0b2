"""Caches of arms that Lamina's pages cannot store, for comparison only: exact rows kept beside what would be read."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lamina.attention.types import AttentionOutput, ReadBasis
from lamina.engines.hf import LaminaCache
from lamina.engines.hf_layer import LaminaLayer
from lamina.errors import CacheStateError
from lamina.pages import WindowConfig


class Packed(NamedTuple):
    """Tokens that the next query reads packed, and the bits an element of their codes and of what scales them."""

    tokens: int
    codes: float
    scales: float


@dataclass
class Rows:
    """One sequence of one layer.

    Attributes
    ----------
    exact, coded : (Tensor, Tensor)
        K and V ``[H, n, D]``: all rows as they came, and the first ones as they are read once packed.
    """

    exact: tuple[Tensor, Tensor]
    coded: tuple[Tensor, Tensor]

    @property
    def length(self) -> int:
        """Tokens."""
        return self.exact[0].shape[1]

    def extended(self, k: Tensor, v: Tensor) -> Any:
        """With more rows."""
        raise NotImplementedError

    def cropped(self, length: int) -> Any:
        """The first rows."""
        raise NotImplementedError

    def exactly(self, position: Tensor, window: WindowConfig) -> Tensor:
        """Which coded rows queries at ``position [T, 1]`` read exactly, bool ``[T or 1, n]``."""
        raise NotImplementedError

    def packed(self, window: WindowConfig) -> Packed:
        """What the next query reads packed."""
        raise NotImplementedError


class RowStore:
    """What a :class:`lamina.pages.LayerStore` does, with rows that never change."""

    def __init__(self, empty: Any) -> None:
        self.empty = empty
        self.dtype, self.device = empty.exact[0].dtype, empty.exact[0].device
        self.sequences: list[Any] = []

    def append(self, k: Tensor, v: Tensor, real: Tensor | None = None, cut: object = None) -> None:
        """Append rows ``[B, H, T, D]``, those that are ``real [B, T]``."""
        if not self.sequences:
            self.sequences = [self.empty] * k.shape[0]
        keep = [slice(None)] * k.shape[0] if real is None else list(real)
        self.sequences = [s.extended(k[b][:, at], v[b][:, at]) for b, (s, at) in enumerate(zip(self.sequences, keep))]

    def last_keys(self, sequence: int, tokens: int) -> Tensor:
        """The last keys of a sequence, ``[H, n, D]``."""
        keys: Tensor = self.sequences[sequence].last_keys(tokens)
        return keys

    def settle(self) -> None:
        """Nothing to release."""

    def crop(self, lengths: list[int]) -> None:
        """Keep the first ``lengths[b]`` tokens."""
        self.sequences = [s.cropped(n) for s, n in zip(self.sequences, lengths)]

    def select(self, indices: list[int]) -> None:
        """Make the batch of these sequences."""
        self.sequences = [self.sequences[i] for i in indices]

    def snapshot(self) -> list[Any]:
        """The sequences as they are."""
        return list(self.sequences)

    def restore(self, snapshot: list[Any]) -> None:
        """Go back."""
        self.sequences = list(snapshot)

    def forget(self, snapshot: list[Any]) -> None:
        """Nothing to release."""

    def extend(self, other: "RowStore") -> None:
        """Add another store's sequences."""
        self.sequences = self.sequences + other.sequences

    def reset(self) -> None:
        """Forget everything."""
        self.sequences = []


class SimulatedLayer(LaminaLayer):
    """A layer whose rows are quantised and dequantised, and kept in full precision."""

    def make_store(self, dtype: torch.dtype, device: torch.device) -> None:
        """Create the store."""
        profile = self.cache.profile.layers[self.index]
        none = torch.empty((profile.n_kv_heads, 0, profile.head_dim), dtype=dtype, device=device)
        self.encoder = self.cache.empty_rows(self.index, none)
        self.store = RowStore(self.encoder)
        t = profile.stored
        self.basis = ReadBasis(t.q_forward, t.v_back, t.mean_v, profile.kappa, self.cache.scaling[self.index])
        self.is_initialized = True

    def read(self, query: Tensor, basis: ReadBasis, chunk: tuple[Tensor, Tensor], only: int | None) -> AttentionOutput:
        """Attention without log-sum-exps; which page is read exactly follows from the query's position."""
        rows = self.store.sequences if only is None else [self.store.sequences[only]]
        out = torch.stack([self._read_one(q, basis, r) for q, r in zip(query, rows)])
        nothing = query.new_full(query.shape[:3], float("nan"), dtype=torch.float32)
        return AttentionOutput(out, nothing, nothing)

    def _read_one(self, query: Tensor, basis: ReadBasis, rows: Any) -> Tensor:
        tokens, length, coded = query.shape[1], rows.length, rows.coded[0].shape[1]
        device = query.device
        q = query.float().unflatten(0, (rows.exact[0].shape[0], -1)) * basis.scaling
        position = torch.arange(length - tokens, length, device=device)[:, None]
        exactly = rows.exactly(position, self.cache.window)
        k, v = (x.float()[:, None] for x in rows.exact)
        k_coded, v_coded = (x[:, None] for x in rows.coded)
        logits = q @ k.mT
        logits[..., :coded] = torch.where(exactly, logits[..., :coded], q @ k_coded.mT)
        if basis.softcap:
            logits = basis.softcap * (logits / basis.softcap).tanh()
        logits = logits.masked_fill(torch.arange(length, device=device) > position, float("-inf"))
        if basis.sinks is not None:
            sinks = basis.sinks.float().view(*q.shape[:2], 1, 1).expand(*q.shape[:3], 1)
            logits = torch.cat([logits, sinks], -1)
        p = logits.softmax(-1)[..., :length]
        far = torch.where(exactly, 0.0, p[..., :coded])
        p[..., :coded] -= far
        return (p @ v + far @ v_coded).flatten(0, 1).transpose(0, 1).to(query.dtype)


class SimulatedCache(LaminaCache):
    """A cache whose bytes are what its codes would take."""

    layer_class = SimulatedLayer

    def empty_rows(self, index: int, none: Tensor) -> Any:
        """Rows of a new sequence of layer ``index``; ``none`` is ``[H, 0, D]``."""
        raise NotImplementedError

    def bits(self) -> dict[str, float]:
        """Bits an element, of packed tokens and of everything."""
        packed = elements = total = 0.0
        for s, n in self._rows():
            tokens, codes, scales = s.packed(self.window)
            packed, elements = packed + tokens * n * (codes + scales), elements + tokens * n
            total += s.length * n
        return {
            "history": packed / elements if elements else float("nan"),
            "context": 8 * sum(self.memory().values()) / total if total else float("nan"),
        }

    def memory(self) -> dict[str, int]:
        """Bytes by kind that a real cache with the same windows would take."""
        codes = scales = windows = 0.0
        for s, n in self._rows():
            packed = s.packed(self.window)
            codes += packed.tokens * n * packed.codes / 8
            scales += packed.tokens * n * packed.scales / 8
            windows += (s.length - packed.tokens) * n * s.exact[0].dtype.itemsize
        return {"codes": int(codes), "scales": int(scales), "windows": int(windows)}

    @property
    def average_tier(self) -> float:
        """Bits of packed tokens without scales."""
        raise NotImplementedError

    def save(self, path: Any) -> None:
        """Not available."""
        raise CacheStateError("a simulated cache cannot be saved")

    def _rows(self) -> list[tuple[Any, int]]:
        """All sequences of all layers, with the elements that a token takes in each."""
        return [(s, 2 * s.exact[0].shape[0] * s.exact[0].shape[2]) for store in self.stores for s in store.sequences]


def fake_quantise(x: Tensor, axis: int, bits: int = 2) -> Tensor:
    """Min/max quantise and dequantise along one axis, with scales and zeros in 16 bits."""
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).bfloat16().float()
    low = low.bfloat16().float()
    codes = torch.where(scale > 0, (x - low) / scale, 0.0).round().clamp(0, 2**bits - 1)
    return low + scale * codes
