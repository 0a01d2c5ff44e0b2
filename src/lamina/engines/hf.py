"""The transformers engine: a cache object and an attention function that reads it."""

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lamina.attention.dispatch import attend
from lamina.attention.types import ReadBasis
from lamina.basis.calibrate import check_attention_interface
from lamina.basis.encoder import PageEncoder
from lamina.basis.geometry import model_geometry
from lamina.basis.profile import Profile
from lamina.codec import CodecConfig
from lamina.codec.page import check_tier
from lamina.errors import CacheStateError, ConfigError, UnsupportedModelError
from lamina.pages import Budget, LayerStore, WindowConfig
from lamina.pages.pager import attach_pager

ATTENTION = "lamina"
HANDLE = "lamina_layer"

Tiers = int | tuple[int, int] | Sequence[tuple[int, int]] | None
"""Bits of K and V: one number, a pair, a pair a layer, or the profile's."""


class LaminaLayer(CacheLayerMixin):
    """One layer of a :class:`LaminaCache`.

    ``update`` returns the rows it was given; the key tensor carries the layer, which the attention function reads.
    """

    is_compileable = False
    is_sliding = False
    is_croppable = True

    def __init__(self, cache: "LaminaCache", index: int) -> None:
        super().__init__()
        self.cache = weakref.proxy(cache)
        self.index = index
        self.store: Any = None
        self.basis: Any = None
        self.unread = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Create the page store, now that dtype and device are known."""
        cache, i = self.cache, self.index
        device = key_states.device
        encoder = PageEncoder(cache.profile.layers[i], cache.codec, cache.scaling[i], device)
        self.store = LayerStore(
            cache.profile.n_kv_heads,
            cache.profile.head_dim,
            key_states.dtype,
            device,
            window=cache.window,
            encoder=encoder,
            tiers=lambda: cache.tiers[i],
            budget=cache.budget,
            centered=cache.codec.center,
            name=f"layer {i}",
        )
        self.basis = ReadBasis(encoder.q_forward, encoder.v_forward, encoder.mean_v, encoder.kappa, encoder.scaling)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store rows ``[B, H, T, D]``; returns them with this layer attached."""
        self.cache.check_state(self.index, key_states.shape[2])
        key_states, value_states = key_states.detach(), value_states.detach()
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        self.store.append(key_states, value_states)
        self.unread = True
        setattr(key_states, HANDLE, self)
        return key_states, value_states

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention output ``[B, T, Hq, D]`` of the tokens that were just stored; it carries no gradient."""
        out = attend(query.detach(), self.store.view(), self.basis, (key, value)).out
        if query.shape[2] > 1:
            self.store.settle()
        return out

    @property
    def scaling(self) -> float:
        """Factor on q.k."""
        return self.basis.scaling

    def get_seq_length(self) -> int:
        """Tokens stored."""
        return self.store.sequences[0].length if self.store is not None and self.store.sequences else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens."""
        self.unread = False
        if self.store is not None and tokens_to_remove:
            self.store.crop(self.get_seq_length() + tokens_to_remove)

    def reset(self) -> None:
        """Forget everything."""
        self.unread = False
        if self.store is not None:
            self.store.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Not available."""
        raise CacheStateError("LaminaCache cannot reorder sequences yet; use num_beams=1")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Not available."""
        raise CacheStateError("LaminaCache cannot repeat sequences yet; repeat the prompt instead")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Not available."""
        raise CacheStateError("LaminaCache cannot select sequences yet; run the batch to its end")


class LaminaCache(Cache):
    """A KV cache of packed pages for a transformers model.

    Pass it as the cache of ``model(...)`` or ``model.generate(...)``. Creating it switches the model's attention to
    ``"lamina"``, which without this cache is transformers' sdpa attention.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder-only model with full attention in every layer.
    profile : Profile
        Calibrated for this model.
    tiers : int, (int, int) or list, optional
        Bits for K and V: one number, a pair, or a pair a layer; default the profile's.
    window : WindowConfig
        Exact windows.
    codec : CodecConfig
        How closed pages are written.
    max_bytes : int, optional
        Upper bound on the cache's bytes; planes are shed, least predicted loss first, to stay below it.

    """

    def __init__(
        self,
        model: PreTrainedModel,
        profile: Profile,
        *,
        tiers: Tiers = None,
        window: WindowConfig | None = None,
        codec: CodecConfig | None = None,
        max_bytes: int | None = None,
    ) -> None:
        if not isinstance(profile, Profile):
            raise ConfigError(f"profile is {profile!r}; load the file first: Profile.load(path)")
        geometry = model_geometry(model.config)
        check_attention_interface(model, geometry)
        profile.check_model(geometry)
        if profile.absorbed != bool(getattr(model.config, "lamina_absorbed", False)):
            raise ConfigError(
                "the profile and the model disagree on whether V's basis was folded into the weights; use the profile "
                "that absorb_value_basis returned with the model it changed, and the original one with others"
            )
        if max_bytes is not None and (not isinstance(max_bytes, int) or max_bytes <= 0):
            raise ConfigError(f"max_bytes={max_bytes!r} must be a positive number of bytes")
        self.profile = profile
        self._tiers = parse_tiers(tiers, profile)
        self.window = window or WindowConfig()
        self.codec = codec or CodecConfig()
        self.budget = Budget(max_bytes)
        self.scaling = layer_scaling(model, geometry.n_layers, geometry.head_dim)
        self.config = model.config.get_text_config(decoder=True)
        self.layers: list[Any] = []
        super().__init__(layers=[LaminaLayer(self, i) for i in range(geometry.n_layers)])
        # A strong reference would leave the cache's tensors to the cycle collector.
        weak = weakref.proxy(self)
        self.pager = attach_pager(self.budget, lambda: [layer.store for layer in weak.layers if layer.store])
        model.set_attn_implementation(ATTENTION)

    @property
    def tiers(self) -> tuple[tuple[int, int], ...]:
        """Bits of K and V for pages that close from now on, one pair a layer; assign to change them at any time."""
        return tuple(self._tiers)

    @tiers.setter
    def tiers(self, tiers: Tiers) -> None:
        self._tiers = parse_tiers(tiers, self.profile)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LaminaCache":
        """Not available."""
        raise CacheStateError("LaminaCache cannot be copied yet; run the prompt again with a new cache")

    def crop(self, tokens: int) -> None:
        """Keep the first ``tokens`` tokens; a negative number removes that many from the end, 0 changes nothing."""
        if isinstance(tokens, bool) or not isinstance(tokens, int):
            raise CacheStateError(f"cannot crop a cache to {tokens!r} tokens; give a whole number")
        lengths = [layer.get_seq_length() for layer in self.layers]
        target = tokens if tokens > 0 else lengths[0] + tokens
        if not 0 <= target <= min(lengths):
            raise CacheStateError(f"cannot crop a cache of {min(lengths)} tokens to {target}")
        for layer, length in zip(self.layers, lengths):
            layer.crop(target - length)

    def check_state(self, index: int, tokens: int) -> None:
        """Raise CacheStateError unless layer ``index`` may take ``tokens`` rows now.

        The model's attention must read this cache, and all layers must be at the same token: a call that failed half
        way leaves the first layers ahead.
        """
        if self.config._attn_implementation != ATTENTION or self.layers[index].unread:
            raise CacheStateError(
                f"layer {index}: the model runs with attention {self.config._attn_implementation!r}, which does not "
                f"read this cache; call model.set_attn_implementation({ATTENTION!r}) and start with a new cache"
            )
        first, here, last = (self.layers[i].get_seq_length() for i in (0, index, -1))
        if here != (first - tokens if index else last):
            whole = min(first, here, last)
            raise CacheStateError(
                f"layer {index} holds {here} tokens, layer 0 {first} and the last one {last}: an earlier call "
                f"failed half way; call {f'cache.crop({whole})' if whole else 'cache.reset()'} to go back to the last "
                "whole token, or take a new cache"
            )

    def memory(self) -> dict[str, int]:
        """Allocated bytes by kind; they add up to the storage of all tensors that hold pages, rows or tables."""
        total = dict.fromkeys(("codes", "scales", "centers", "windows", "page_tables"), 0)
        for layer in self.layers:
            if layer.store is not None:
                for kind, n_bytes in layer.store.memory().items():
                    total[kind] += n_bytes
        return total

    def bits(self) -> dict[str, float]:
        """Average bits per element: ``history`` of the packed tokens alone, ``context`` of everything allocated."""
        stores = [layer.store for layer in self.layers if layer.store is not None]
        packed, elements = (sum(x) for x in zip(*(s.history_bits() for s in stores))) if stores else (0, 0)
        stored = sum(2 * s.layout.n_heads * s.layout.head_dim * q.length for s in stores for q in s.sequences)
        return {
            "history": packed / elements if elements else float("nan"),
            "context": 8 * sum(self.memory().values()) / stored if stored else float("nan"),
        }


def parse_tiers(tiers: Tiers, profile: Profile) -> list[tuple[int, int]]:
    """One checked pair of bits a layer."""
    n = len(profile.layers)
    given: Any = profile.tiers if tiers is None else tiers
    if isinstance(given, int):
        given = (given, given)
    if isinstance(given, tuple) and len(given) == 2 and all(isinstance(bits, int) for bits in given):
        given = [given] * n
    if (
        not isinstance(given, list | tuple)
        or len(given) != n
        or any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in given)
    ):
        raise ConfigError(f"tiers {tiers!r} must be one number, a pair (K, V), or {n} pairs, one a layer")
    for i, pair in enumerate(given):
        for side, bits in zip("KV", pair):
            check_tier(bits, f"the {side} tier of layer {i}")
    return [(int(k), int(v)) for k, v in given]


def layer_scaling(model: PreTrainedModel, n_layers: int, head_dim: int) -> list[float]:
    """Factor on q.k of every layer, read from the attention modules."""
    found = [head_dim**-0.5] * n_layers
    for module in model.modules():
        index, scaling = getattr(module, "layer_idx", None), getattr(module, "scaling", None)
        if isinstance(index, int) and index < n_layers and isinstance(scaling, float):
            found[index] = scaling
    return found


def cache_kwarg(model: PreTrainedModel, cache: Cache) -> dict[str, Cache]:
    """The cache under the keyword that this transformers version uses for it."""
    names = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


def lamina_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function registered with transformers under ``"lamina"``.

    Rows that come from a :class:`LaminaCache` are read from its pages; any other call is sdpa attention.
    """
    layer: LaminaLayer | None = getattr(key, HANDLE, None)
    if layer is not None:
        delattr(key, HANDLE)
        layer.unread = False
        _check_call(layer, query, attention_mask, scaling, dropout, kwargs)
        if layer.get_seq_length() > query.shape[2]:
            return layer.attend(query, key, value), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)


def _check_call(
    layer: LaminaLayer,
    query: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> None:
    """Refuse what packed attention does not do."""
    for name in ("softcap", "s_aux", "sliding_window", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"layer {layer.index}: attention with {name!r} cannot read a packed cache")
    if dropout:
        raise CacheStateError(f"layer {layer.index}: attention dropout {dropout}; call model.eval() first")
    if scaling is not None and abs(scaling - layer.scaling) > 1e-6 * abs(scaling):
        raise UnsupportedModelError(f"layer {layer.index}: logits are scaled by {scaling}, not {layer.scaling}")
    if mask is not None:
        last = mask[:, :, -1] if mask.dtype == torch.bool else mask[:, :, -1] == 0
        if not bool(last.all()):
            raise CacheStateError(
                "the attention mask hides tokens: a LaminaCache takes sequences of equal length without padding; "
                "generate prompts of different lengths one by one"
            )


AttentionInterface.register(ATTENTION, lamina_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
