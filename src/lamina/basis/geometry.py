"""What Lamina needs to know of a model, and which models it refuses."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from lamina.errors import UnsupportedModelError

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


@dataclass(frozen=True)
class ModelGeometry:
    """Shape of a decoder's attention.

    Attributes
    ----------
    n_layers, n_heads, n_kv_heads, head_dim : int
        Layers, query heads, KV heads and head dimension.
    max_positions : int
        Positions that the model was made for.
    config_hash : str
        First 16 hex digits of a SHA-256 over the fields that define the architecture.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_positions: int
    config_hash: str


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
    if reason:
        raise UnsupportedModelError(f"Lamina cannot serve {name!r} models of this kind: {reason}")
    n_heads = text.num_attention_heads
    return ModelGeometry(
        n_layers=text.num_hidden_layers,
        n_heads=n_heads,
        n_kv_heads=getattr(text, "num_key_value_heads", None) or n_heads,
        head_dim=_head_dim(text),
        max_positions=getattr(text, "max_position_embeddings", None) or 131072,
        config_hash=config_hash(text),
    )


def config_hash(text: Any) -> str:
    """Hash of the fields that define the architecture; equal for every dtype and transformers version."""
    fields = {name: getattr(text, name, None) for name in HASHED_FIELDS}
    fields["head_dim"] = _head_dim(text)
    fields["layer_types"] = sorted(set(fields["layer_types"] or ["full_attention"]))
    rope = getattr(text, "rope_parameters", None) or {}
    fields["rope_theta"] = float(fields["rope_theta"] or rope.get("rope_theta") or 0)
    fields["rope_type"] = rope.get("rope_type", "default")
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _head_dim(text: Any) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _refusal(config: Any, text: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it has cross attention; use a decoder-only model"
    if getattr(text, "kv_lora_rank", None):
        return "multi-head latent attention already compresses its cache, and has no per-head keys to store"
    if getattr(text, "num_attention_heads", None) is None or getattr(text, "num_hidden_layers", None) is None:
        return "its configuration names no attention heads or layers"
    odd = sorted(set(getattr(text, "layer_types", None) or []) - {"full_attention"})
    if odd:
        return f"it has layers of type {', '.join(odd)}; every layer must be full attention"
    if getattr(text, "layer_types", None) is None and getattr(text, "sliding_window", None):
        return f"it has a sliding window of {text.sliding_window} tokens; every layer must be full attention"
    if getattr(text, "attn_logit_softcapping", None):
        return "its attention caps the logits"
    if getattr(text, "num_kv_shared_layers", None) or getattr(text, "kv_sharing_modes", None):
        return "its layers share keys and values"
    if getattr(text, "model_type", "") == "gpt_oss":
        return "its attention has sink logits"
    head_dim = _head_dim(text)
    if head_dim % 16 or head_dim > 256:
        return f"its head dimension is {head_dim}; it must be a multiple of 16 up to 256"
    return None
