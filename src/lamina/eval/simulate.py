"""Caches of arms that Lamina's pages cannot store, for comparison only."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lamina.attention.types import AttentionOutput, ReadBasis
from lamina.basis.geometry import model_geometry
from lamina.basis.profile import Profile
from lamina.codec import PAGE_TOKENS
from lamina.engines.hf import LaminaCache
from lamina.engines.hf_layer import LaminaLayer
from lamina.engines.host_layers import host_layers, n_bytes, tensors_of
from lamina.errors import CacheStateError
from lamina.pages import WindowConfig

KIVI_GROUP = 32


class Bf16Layer(DynamicLayer):
    """Rows rounded to bfloat16, whatever the model computes in."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store and return all rows."""
        dtype = key_states.dtype
        return super().update(key_states.bfloat16().to(dtype), value_states.bfloat16().to(dtype), *args, **kwargs)


class Bf16Cache(Cache):
    """The exact baseline: 16 bits an element."""

    def __init__(self, model: PreTrainedModel) -> None:
        geometry = model_geometry(model.config)
        layers = host_layers(model.config.get_text_config(decoder=True))
        for i in geometry.packed:
            layers[i] = Bf16Layer()
        self.layers: list[Any] = []
        super().__init__(layers=layers)

    def bits(self) -> dict[str, float]:
        """16 bits, windows or not."""
        return {"history": 16.0, "context": 16.0}

    def memory(self) -> dict[str, int]:
        """Bytes that bfloat16 rows take."""
        rows = [t for layer in self.layers if isinstance(layer, Bf16Layer) for t in tensors_of(layer).values()]
        others = [layer for layer in self.layers if not isinstance(layer, Bf16Layer)]
        total = {"rows": sum(2 * t.numel() for t in rows)}
        return total | {"host_layers": sum(map(n_bytes, others))} if others else total


@dataclass
class KiviRows:
    """One sequence of one layer: all rows exactly, two ``[H, n, D]``, and full pages as KIVI reads them."""

    exact: tuple[Tensor, Tensor]
    coded: tuple[Tensor, Tensor]

    @property
    def length(self) -> int:
        """Tokens."""
        return self.exact[0].shape[1]

    def extended(self, k: Tensor, v: Tensor) -> "KiviRows":
        """With more rows, full pages coded."""
        k, v = (torch.cat([a, b], 1) for a, b in zip(self.exact, (k, v)))
        done, full = self.coded[0].shape[1], k.shape[1] // PAGE_TOKENS * PAGE_TOKENS
        groups = k[:, done:full].float().unflatten(1, ((full - done) // KIVI_GROUP, KIVI_GROUP))
        new = fake_quantise(groups, 2).flatten(1, 2), fake_quantise(v[:, done:full].float(), 2)
        return KiviRows((k, v), (torch.cat([self.coded[0], new[0]], 1), torch.cat([self.coded[1], new[1]], 1)))

    def cropped(self, length: int) -> "KiviRows":
        """The first rows; a page that is cut is exact again."""
        full = length // PAGE_TOKENS * PAGE_TOKENS
        k, v = self.exact
        return KiviRows((k[:, :length], v[:, :length]), (self.coded[0][:, :full], self.coded[1][:, :full]))


class KiviStore:
    """What a :class:`lamina.pages.LayerStore` does, with rows that never change."""

    def __init__(self, n_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.shape = (n_heads, 0, head_dim)
        self.sequences: list[KiviRows] = []

    def append(self, k: Tensor, v: Tensor, real: Tensor | None = None) -> None:
        """Append rows ``[B, H, T, D]``, those that are ``real [B, T]``."""
        if not self.sequences:
            none = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self.sequences = [KiviRows((none, none), (none.float(), none.float()))] * k.shape[0]
        keep = [slice(None)] * k.shape[0] if real is None else list(real)
        self.sequences = [s.extended(k[b][:, at], v[b][:, at]) for b, (s, at) in enumerate(zip(self.sequences, keep))]

    def settle(self) -> None:
        """Nothing to release."""

    def prepare_crop(self, lengths: list[int]) -> None:
        """Nothing to reserve."""

    def crop(self, lengths: list[int]) -> None:
        """Keep the first ``lengths[b]`` tokens."""
        self.sequences = [s.cropped(n) for s, n in zip(self.sequences, lengths)]

    def select(self, indices: list[int]) -> None:
        """Make the batch of these sequences."""
        self.sequences = [self.sequences[i] for i in indices]

    def snapshot(self) -> list[KiviRows]:
        """The sequences as they are."""
        return list(self.sequences)

    def restore(self, snapshot: list[KiviRows]) -> None:
        """Go back."""
        self.sequences = list(snapshot)

    def forget(self, snapshot: list[KiviRows]) -> None:
        """Nothing to release."""

    def extend(self, other: "KiviStore") -> None:
        """Add another store's sequences."""
        self.sequences = self.sequences + other.sequences

    def reset(self) -> None:
        """Forget everything."""
        self.sequences = []


class KiviLayer(LaminaLayer):
    """KIVI at 2 bits with Lamina's windows."""

    def make_store(self, dtype: torch.dtype, device: torch.device) -> None:
        """Create the store."""
        profile = self.cache.profile.layers[self.index]
        self.store = KiviStore(profile.n_kv_heads, profile.head_dim, dtype, device)
        t = profile.transform
        self.basis = ReadBasis(t.q_forward, t.v_forward, t.mean_v, profile.kappa, self.cache.scaling[self.index])
        self.is_initialized = True

    def read(self, query: Tensor, basis: ReadBasis, chunk: tuple[Tensor, Tensor], only: int | None) -> AttentionOutput:
        """Attention without log-sum-exps; which page is read exactly follows from the query's position."""
        rows = self.store.sequences if only is None else [self.store.sequences[only]]
        out = torch.stack([self._read_one(q, basis, r) for q, r in zip(query, rows)])
        nothing = query.new_full(query.shape[:3], float("nan"), dtype=torch.float32)
        return AttentionOutput(out, nothing, nothing)

    def _read_one(self, query: Tensor, basis: ReadBasis, rows: KiviRows) -> Tensor:
        tokens, length, coded = query.shape[1], rows.length, rows.coded[0].shape[1]
        window, device = self.cache.window, query.device
        q = query.float().unflatten(0, (rows.exact[0].shape[0], -1)) * basis.scaling
        position = torch.arange(length - tokens, length, device=device)[:, None]
        at = torch.arange(length, device=device)
        start = at // PAGE_TOKENS * PAGE_TOKENS
        exactly = (start < window.sink) | (start >= position // PAGE_TOKENS * PAGE_TOKENS - window.recent)
        k, v = (x.float()[:, None] for x in rows.exact)
        k_coded, v_coded = (x[:, None] for x in rows.coded)
        logits = q @ k.mT
        logits[..., :coded] = torch.where(exactly[:, :coded], logits[..., :coded], q @ k_coded.mT)
        if basis.softcap:
            logits = basis.softcap * (logits / basis.softcap).tanh()
        logits = logits.masked_fill(at > position, float("-inf"))
        if basis.sinks is not None:
            sinks = basis.sinks.float().view(*q.shape[:2], 1, 1).expand(*q.shape[:3], 1)
            logits = torch.cat([logits, sinks], -1)
        p = logits.softmax(-1)[..., :length]
        far = torch.where(exactly[:, :coded], 0.0, p[..., :coded])
        p[..., :coded] -= far
        return (p @ v + far @ v_coded).flatten(0, 1).transpose(0, 1).to(query.dtype)


class KiviCache(LaminaCache):
    """Simulated KIVI cache; its bytes are what the codes would take."""

    layer_class = KiviLayer

    def __init__(self, model: PreTrainedModel, profile: Profile, window: WindowConfig) -> None:
        super().__init__(model, profile, window=window)

    def bits(self) -> dict[str, float]:
        """Codes and their 16-bit scales and zeros."""
        packed = elements = total = 0.0
        for s, n in self._rows():
            exact = self._exact(s)
            packed += (s.length - exact) * n * self._bits_of(s)
            elements += (s.length - exact) * n
            total += s.length * n
        nominal = [2 + (32 / KIVI_GROUP + 32 / layer.head_dim) / 2 for layer in self.profile.packed.values()]
        return {
            "history": packed / elements if elements else nominal[0],
            "context": 8 * sum(self.memory().values()) / total if total else float("nan"),
        }

    def memory(self) -> dict[str, int]:
        """Bytes that a real cache with the same windows would take."""
        codes = windows = 0.0
        for s, n in self._rows():
            exact = self._exact(s)
            codes += (s.length - exact) * n * self._bits_of(s) / 8
            windows += exact * n * s.exact[0].dtype.itemsize
        return {"codes": int(codes), "windows": int(windows)}

    def save(self, path: Any) -> None:
        """Not available."""
        raise CacheStateError("a simulated cache cannot be saved")

    def _rows(self) -> list[tuple[KiviRows, int]]:
        """All sequences of all layers, with the elements that a token takes in each."""
        return [(s, 2 * s.exact[0].shape[0] * s.exact[0].shape[2]) for store in self.stores for s in store.sequences]

    def _exact(self, s: KiviRows) -> int:
        return min(s.length, self.window.sink + self.window.recent + s.length % PAGE_TOKENS)

    def _bits_of(self, s: KiviRows) -> float:
        return 2 + (32 / KIVI_GROUP + 32 / s.exact[0].shape[2]) / 2


def fake_quantise(x: Tensor, axis: int, bits: int = 2) -> Tensor:
    """Min/max quantise and dequantise along one axis, with scales and zeros in 16 bits."""
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).bfloat16().float()
    low = low.bfloat16().float()
    codes = torch.where(scale > 0, (x - low) / scale, 0.0).round().clamp(0, 2**bits - 1)
    return low + scale * codes
