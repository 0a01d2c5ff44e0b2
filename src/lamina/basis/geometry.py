"""What Lamina needs to know of a model, which of its layers it keeps, and which models it refuses."""

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from transformers import DynamicCache

from lamina.errors import UnsupportedModelError

MAX_HEAD_DIM = 512
HASHED_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "rope_theta",
    "max_position_embeddings",
)


class LayerKind(StrEnum):
    """What a layer keeps of the tokens it has seen."""

    FULL = "full attention"
    WINDOW = "sliding window"
    STATE = "linear attention"
    SHARED = "keys and values of an earlier layer"
    NONE = "nothing"


KINDS = {
    "DynamicLayer": LayerKind.FULL,
    "DynamicSlidingWindowLayer": LayerKind.WINDOW,
    "LinearAttentionLayer": LayerKind.STATE,
    "DummyLayer": LayerKind.NONE,
}
"""transformers' cache layers."""


@dataclass(frozen=True)
class LayerGeometry:
    """One layer's attention.

    Attributes
    ----------
    kind : LayerKind
        Lamina keeps full-attention layers; transformers keeps the others.
    n_kv_heads, head_dim : int
        KV heads and head dimension.
    window : int
        Tokens of a sliding window, else 0.
    """

    kind: LayerKind
    n_kv_heads: int
    head_dim: int
    window: int = 0


@dataclass(frozen=True)
class ModelGeometry:
    """Shape of a decoder's attention.

    Attributes
    ----------
    layers : tuple of LayerGeometry
        One a layer.
    n_heads : int
        Query heads.
    max_positions : int
        Positions that the model was made for.
    softcap : float
        Cap of the attention logits, 0 for none.
    config_hash : str
        First 16 hex digits of a SHA-256 over the fields that define the architecture.
    """

    layers: tuple[LayerGeometry, ...]
    n_heads: int
    max_positions: int
    softcap: float
    config_hash: str

    @property
    def n_layers(self) -> int:
        """All layers."""
        return len(self.layers)

    @cached_property
    def packed(self) -> dict[int, LayerGeometry]:
        """The layers that Lamina keeps, by index."""
        return {i: g for i, g in enumerate(self.layers) if g.kind == LayerKind.FULL}

    @property
    def shares_kv(self) -> bool:
        """Whether layers read what an earlier layer stored."""
        return any(g.kind == LayerKind.SHARED for g in self.layers)

    def elements(self, tokens: int) -> int:
        """Elements of K and V that ``tokens`` tokens take in the packed layers."""
        return sum(2 * g.n_kv_heads * g.head_dim for g in self.packed.values()) * tokens

    def window_elements(self, tokens: int) -> int:
        """Elements of K and V that the sliding-window layers keep of ``tokens`` tokens."""
        kept = (g for g in self.layers if g.kind == LayerKind.WINDOW)
        return sum(2 * g.n_kv_heads * g.head_dim * min(tokens, g.window) for g in kept)


def model_geometry(config: Any) -> ModelGeometry:
    """Read the geometry of a transformers configuration.

    Raises
    ------
    UnsupportedModelError
        Naming the part of the model that Lamina cannot serve.
    """
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    name = getattr(text, "model_type", type(text).__name__)
    reason = _refusal(config, text)
    layers: tuple[LayerGeometry, ...] = ()
    if reason is None:
        layers = tuple(_layer(text, i, x) for i, x in enumerate(_cache_layers(text)))
        reason = _refusal_of_layers(layers, text)
    if reason is not None:
        raise UnsupportedModelError(f"Lamina cannot serve {name!r} models of this kind: {reason}")
    return ModelGeometry(
        layers=layers,
        n_heads=_most(_value(text, "num_attention_heads")),
        max_positions=getattr(text, "max_position_embeddings", None) or 131072,
        softcap=float(getattr(text, "attn_logit_softcapping", None) or 0),
        config_hash=config_hash(text),
    )


def config_hash(text: Any) -> str:
    """Hash of the fields that define the architecture; equal for every dtype and transformers version."""
    fields = {name: _value(text, name) for name in HASHED_FIELDS}
    fields["head_dim"] = fields["head_dim"] or _head_dim(text)
    types = fields["layer_types"] or ["full_attention"]
    fields["layer_types"] = list(types) if len(set(types)) > 1 else sorted(set(types))
    rope = getattr(text, "rope_parameters", None) or {}
    fields["rope_theta"] = float(fields["rope_theta"] or rope.get("rope_theta") or 0)
    fields["rope_type"] = rope.get("rope_type", "default")
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _cache_layers(text: Any) -> list[Any]:
    """Transformers' own cache layers, None for each layer at the end that it leaves out because it shares."""
    try:
        layers: list[Any] = list(DynamicCache(config=text).layers)
    except KeyError as error:
        raise UnsupportedModelError(
            f"Lamina cannot serve {text.model_type!r} models of this kind: transformers has no cache for layers of "
            f"type {error}"
        ) from error
    return layers + [None] * (text.num_hidden_layers - len(layers))


def _layer(text: Any, index: int, cache_layer: Any) -> LayerGeometry:
    per_layer = getattr(text, "per_layer_config", None)
    config = per_layer[index] if per_layer else text
    name = type(cache_layer).__name__
    kind = LayerKind.SHARED if cache_layer is None else KINDS.get(name)
    modes = getattr(text, "kv_sharing_modes", None)
    if modes and modes[index] == "reuse":
        kind = LayerKind.SHARED
    if kind is None:
        raise UnsupportedModelError(
            f"Lamina cannot serve {text.model_type!r} models of this kind: layer {index} needs transformers' {name}"
        )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    window = getattr(cache_layer, "sliding_window", None) if kind == LayerKind.WINDOW else 0
    return LayerGeometry(kind, heads, _head_dim(config), window or 0)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _value(text: Any, name: str) -> Any:
    """A field of a configuration, None without it; one value a layer where transformers has one a layer."""
    try:
        return getattr(text, name, None)
    except RuntimeError:
        return [getattr(layer, name, None) for layer in text.per_layer_config]


def _most(value: int | list[int]) -> int:
    return max(value) if isinstance(value, list) else value


def _refusal(config: Any, text: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it has cross attention; use a decoder-only model"
    if getattr(text, "kv_lora_rank", None):
        return "multi-head latent attention already compresses its cache, and has no per-head keys to store"
    if _value(text, "num_attention_heads") is None or getattr(text, "num_hidden_layers", None) is None:
        return "its configuration names no attention heads or layers"
    if getattr(text, "add_cross_attention", False) or getattr(text, "cross_attention_layers", None):
        return "it has cross attention; use a decoder-only model"
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        return "its attention looks ahead"
    return None


def _refusal_of_layers(layers: tuple[LayerGeometry, ...], text: Any) -> str | None:
    packed = [g for g in layers if g.kind == LayerKind.FULL]
    if not packed:
        windows = sorted({g.window for g in layers if g.kind == LayerKind.WINDOW})
        if windows:
            return f"every layer has a sliding window of {windows[0]} tokens, which bounds its cache already"
        return "no layer has full attention, so there is nothing that grows with the context"
    for dim in sorted({g.head_dim for g in packed}):
        if dim % 16 or dim > MAX_HEAD_DIM:
            return f"its head dimension is {dim}; it must be a multiple of 16 up to {MAX_HEAD_DIM}"
    value_dim = getattr(text, "v_head_dim", None)
    if value_dim is not None and any(g.head_dim != value_dim for g in packed):
        return f"its values have {value_dim} channels a head, its keys {packed[0].head_dim}"
    return None
