"""Which models can be served, and what identifies one."""

from typing import Any

import pytest
import transformers

from lamina.basis.geometry import LayerGeometry, LayerKind, model_geometry
from lamina.errors import LaminaError, UnsupportedModelError
from tiny_models import KINDS, config

FULL = ["full_attention"] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_geometry_of_served_models(kind: str) -> None:
    c = config(kind)
    g = model_geometry(c)
    layer = LayerGeometry(LayerKind.FULL, c.num_key_value_heads, getattr(c, "head_dim", None) or 16)
    assert g.layers == (layer, layer) and g.packed == {0: layer, 1: layer}
    assert (g.n_layers, g.n_heads, g.max_positions, g.softcap) == (2, c.num_attention_heads, 4096, 0)
    assert g.elements(10) == 2 * 2 * layer.n_kv_heads * layer.head_dim * 10 and not g.shares_kv
    assert len(g.config_hash) == 16


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("sliding window", "Mistral", {"sliding_window": 4096}, "a sliding window of 4096 tokens"),
    ("multi-head latent", "DeepseekV3", {}, "multi-head latent attention"),
    ("head dim 72", "Llama", {"head_dim": 72}, "head dimension is 72; it must be a multiple of 16 up to 512"),
    ("head dim 528", "Llama", {"head_dim": 528}, "head dimension is 528"),
    ("encoder-decoder", "T5", {}, "cross attention"),
    ("nothing but windows", "Gemma2", {"layer_types": ["sliding_attention"] * 2}, "every layer has a sliding window"),
    ("nothing but states", "Qwen3Next", {"layer_types": ["linear_attention"] * 2}, "no layer has full attention"),
    ("layers of another kind", "Llama", {"layer_types": ["full_attention", "hybrid"]}, "layer 1 needs transformers'"),
    ("state space", "Mamba", {}, "no attention heads"),
]


@pytest.mark.parametrize(("kind", "changes", "reason"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_models_that_cannot_be_served_are_refused_with_the_reason(kind: str, changes: dict, reason: str) -> None:
    sizes = {"num_hidden_layers": 2, "num_layers": 2} if kind == "T5" else {"num_hidden_layers": 2}
    c = getattr(transformers, f"{kind}Config")(**sizes, **changes)
    with pytest.raises(UnsupportedModelError, match=f"Lamina cannot serve .*: .*{reason}"):
        model_geometry(c)
    assert issubclass(UnsupportedModelError, LaminaError)


def test_layers_that_stay_with_transformers() -> None:
    types = ["sliding_attention", "full_attention", "full_attention"]
    g = model_geometry(config("Gemma2", num_hidden_layers=3, layer_types=types, sliding_window=128, head_dim=32))
    assert [layer.kind for layer in g.layers] == [LayerKind.WINDOW, LayerKind.FULL, LayerKind.FULL]
    assert list(g.packed) == [1, 2] and g.softcap == 50
    assert g.elements(1000) == 2 * 2 * 2 * 32 * 1000 and g.window_elements(1000) == 2 * 2 * 32 * 128
    assert g.window_elements(100) == 2 * 2 * 32 * 100
    other = model_geometry(config("Gemma2", num_hidden_layers=3, layer_types=types[::-1], head_dim=32))
    assert other.config_hash != g.config_hash, "the order of the layers counts"


def test_the_hash_names_the_architecture_and_nothing_else() -> None:
    base = model_geometry(config("Llama")).config_hash
    assert model_geometry(config("Llama", dtype="bfloat16", initializer_range=0.3, use_cache=False)).config_hash == base
    assert model_geometry(config("Llama", layer_types=FULL)).config_hash == base
    for changes in (
        {"num_hidden_layers": 3}, {"hidden_size": 128}, {"vocab_size": 200}, {"num_key_value_heads": 4},
        {"head_dim": 64}, {"intermediate_size": 128}, {"max_position_embeddings": 8192},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ):  # fmt: skip
        assert model_geometry(config("Llama", **changes)).config_hash != base, changes
    assert (
        model_geometry(config("Qwen2", num_attention_heads=2)).config_hash
        != model_geometry(config("Qwen2")).config_hash
    )


def test_the_text_part_of_a_multimodal_configuration_counts() -> None:
    text = config("Qwen2").to_dict()
    c = transformers.LlavaConfig(text_config=text)
    assert model_geometry(c) == model_geometry(config("Qwen2"))
