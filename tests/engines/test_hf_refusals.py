"""Models that Lamina cannot serve are refused when the cache is made, with the reason, and left untouched."""

from typing import Any

import pytest
import transformers

from lamina.engines.hf import LaminaCache
from lamina.errors import ProfileError, UnsupportedModelError
from tiny_models import SIZES, build, config, profile_of

SMALL = SIZES | {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}

MODELS: list[tuple[str, str, dict[str, Any], str]] = [
    ("sliding window", "Mistral", {"sliding_window": 128}, "sliding window of 128 tokens"),
    ("head dim 72", "Llama", {"head_dim": 72}, "head dimension is 72"),
    ("own attention", "Bloom", {}, "does not use transformers' attention interface"),
]


@pytest.mark.parametrize(("kind", "changes", "reason"), [m[1:] for m in MODELS], ids=[m[0] for m in MODELS])
def test_causal_models(kind: str, changes: dict[str, Any], reason: str) -> None:
    c = getattr(transformers, f"{kind}Config")(**{**SMALL, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(c).eval()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=reason):
        LaminaCache(model, profile_of("Llama"))
    assert model.config._attn_implementation == before


def test_multi_head_latent_attention() -> None:
    c = transformers.DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4}, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
        kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
        moe_intermediate_size=32, first_k_dense_replace=1,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="multi-head latent attention"):
        LaminaCache(transformers.DeepseekV3ForCausalLM(c), profile_of("Llama"))


def test_encoder_decoders() -> None:
    c = transformers.T5Config(d_model=64, d_kv=16, num_layers=2, num_heads=4, d_ff=96, vocab_size=128)
    with pytest.raises(UnsupportedModelError, match="it has cross attention; use a decoder-only model"):
        LaminaCache(transformers.T5ForConditionalGeneration(c), profile_of("Llama"))


def test_a_profile_of_another_model_is_refused_before_anything_changes() -> None:
    model = build("Qwen2")
    with pytest.raises(ProfileError, match="does not fit this model"):
        LaminaCache(model, profile_of("Llama"))
    assert model.config._attn_implementation == "sdpa"
    assert config("Qwen2").num_hidden_layers == 2
