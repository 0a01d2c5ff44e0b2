"""Caches of arms that Lamina's pages cannot store, for comparison only."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from lamina.basis.geometry import model_geometry
from lamina.codec import PAGE_TOKENS
from lamina.engines.hf import ATTENTION, HANDLE, layer_scaling
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
        self.layers: list[Any] = []
        super().__init__(layers=[Bf16Layer() for _ in range(model_geometry(model.config).n_layers)])

    def bits(self) -> dict[str, float]:
        """16 bits, windows or not."""
        return {"history": 16.0, "context": 16.0}

    def memory(self) -> dict[str, int]:
        """Bytes that bfloat16 rows take."""
        return {"rows": sum(2 * (layer.keys.numel() + layer.values.numel()) for layer in self.layers)}


class KiviLayer(CacheLayerMixin):
    """KIVI at 2 bits with Lamina's windows: exact rows beside their quantised and dequantised copies."""

    def __init__(self, index: int, scaling: float, window: WindowConfig) -> None:
        super().__init__()
        self.index, self.scaling, self.window = index, scaling, window
        self.unread = False
        self.exact: list[Tensor] = []
        self.coded: list[Tensor] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Start empty."""
        self.exact = [x[:, :, :0] for x in (key_states, value_states)]
        self.coded = list(self.exact)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store rows and code the pages that are full."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.exact = [torch.cat([a, b], 2) for a, b in zip(self.exact, (key_states, value_states))]
        done, full = self.coded[0].shape[2], self.exact[0].shape[2] // PAGE_TOKENS * PAGE_TOKENS
        k, v = (x[:, :, done:full].float() for x in self.exact)
        groups = k.unflatten(2, (-1, KIVI_GROUP)) if full > done else k[:, :, :, None]
        k = fake_quantise(groups, 3).flatten(2, 3)
        self.coded = [torch.cat([a, b], 2) for a, b in zip(self.coded, (k, fake_quantise(v, 3)))]
        setattr(key_states, HANDLE, self)
        return key_states, value_states

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Output ``[B, T, Hq, D]``; which page is read exactly follows from the query's position."""
        tokens, length = query.shape[2], self.get_seq_length()
        coded = self.coded[0].shape[2]
        q = query.float().unflatten(1, (key.shape[1], -1)) * self.scaling
        position = torch.arange(length - tokens, length)[:, None]
        start = torch.arange(length) // PAGE_TOKENS * PAGE_TOKENS
        recent = position // PAGE_TOKENS * PAGE_TOKENS - self.window.recent
        exactly = (start < self.window.sink) | (start >= recent)
        k, v = (x.float()[:, :, None] for x in self.exact)
        k_coded, v_coded = (x[:, :, None] for x in self.coded)
        logits = q @ k.mT
        logits[..., :coded] = torch.where(exactly[:, :coded], logits[..., :coded], q @ k_coded.mT)
        logits = logits.masked_fill(torch.arange(length) > position, float("-inf"))
        p = logits.softmax(-1)
        far = torch.where(exactly[:, :coded], 0.0, p[..., :coded])
        p[..., :coded] -= far
        return (p @ v + far @ v_coded).flatten(1, 2).transpose(1, 2).to(query.dtype)

    def get_seq_length(self) -> int:
        """Tokens stored."""
        return self.exact[0].shape[2] if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length


class KiviCache(Cache):
    """Simulated KIVI cache; its bytes are what the codes would take."""

    def __init__(self, model: PreTrainedModel, window: WindowConfig) -> None:
        self.geometry = model_geometry(model.config)
        self.window = window
        scaling = layer_scaling(model, self.geometry.n_layers, self.geometry.head_dim)
        self.layers: list[Any] = []
        super().__init__(layers=[KiviLayer(i, s, window) for i, s in enumerate(scaling)])
        model.set_attn_implementation(ATTENTION)

    def bits(self) -> dict[str, float]:
        """Codes and their 16-bit scales and zeros."""
        history = 2 + (32 / KIVI_GROUP + 32 / self.geometry.head_dim) / 2
        elements = sum(2 * layer.exact[0].numel() for layer in self.layers)
        return {"history": history, "context": 8 * sum(self.memory().values()) / elements}

    def memory(self) -> dict[str, int]:
        """Bytes that a real cache with the same windows would take."""
        codes = rows = 0
        for layer in self.layers:
            k = layer.exact[0]
            per_token = 2 * k[:, :, 0].numel()
            exact = min(k.shape[2], self.window.sink + self.window.recent + k.shape[2] % PAGE_TOKENS)
            codes += (k.shape[2] - exact) * per_token
            rows += exact * per_token * k.dtype.itemsize
        return {"codes": int(codes * (2 + (32 / KIVI_GROUP + 32 / self.geometry.head_dim) / 2) / 8), "windows": rows}


def fake_quantise(x: Tensor, axis: int, bits: int = 2) -> Tensor:
    """Min/max quantise and dequantise along one axis, with scales and zeros in 16 bits."""
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).bfloat16().float()
    low = low.bfloat16().float()
    codes = torch.where(scale > 0, (x - low) / scale, 0.0).round().clamp(0, 2**bits - 1)
    return low + scale * codes
