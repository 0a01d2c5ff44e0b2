"""Tiny models of many architectures, and what Lamina does with each; read by the tests and by a benchmark."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from tiny_models import SIZES

WINDOW = 96
"""Tokens of every sliding window and chunk."""


class Verdict(StrEnum):
    """What Lamina does with a model."""

    SERVED = "served"
    PARTLY = "partly"
    REFUSED = "refused"


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes
    ----------
    name : str
        As users know it.
    config, model : str
        Classes of transformers.
    verdict : Verdict
        Served with all layers packed, partly with some, or refused.
    changes : dict
        Fields of the configuration besides ``SIZES``.
    packed : tuple of int
        Layers that Lamina keeps, where it keeps some.
    extras : str
        What the architecture has that others lack.
    reason : str
        Part of the message of a refusal.
    padding : bool
        Whether transformers itself gives a padded sequence the logits that it has alone.
    """

    name: str
    config: str
    model: str
    verdict: Verdict
    changes: dict[str, Any] = field(default_factory=dict)
    packed: tuple[int, ...] = ()
    extras: str = ""
    reason: str = ""
    padding: bool = True

    @property
    def missing(self) -> str | None:
        """Why this version of transformers cannot build the model, None if it can."""
        absent = [name for name in (self.config, self.model) if not hasattr(transformers, name)]
        return f"transformers {transformers.__version__} has no {absent[0]}" if absent else None

    def configuration(self, **changes: Any) -> PreTrainedConfig:
        """Configuration of the tiny model."""
        fields = SIZES | self.changes | changes
        return getattr(transformers, self.config)(**{name: x for name, x in fields.items() if x is not OMIT})

    def build(self, seed: int = 0, **changes: Any) -> PreTrainedModel:
        """A fresh model in evaluation mode, float32, with biases and norms that are not their neutral values."""
        torch.manual_seed(seed)
        model = getattr(transformers, self.model)(self.configuration(**changes)).eval()
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(p, std=0.2)
            elif name.endswith("sinks"):
                torch.nn.init.normal_(p, mean=10.0)
        return model


OMIT: Any = object()
"""In the place of a field that a configuration must not be given."""

HEADS = {"head_dim": 32}
MOE = HEADS | {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}


def of(*kinds: str) -> dict[str, Any]:
    """Layers of these kinds."""
    return {"num_hidden_layers": len(kinds), "layer_types": list(kinds), "sliding_window": WINDOW} | HEADS


S, F, C, L = "sliding_attention", "full_attention", "chunked_attention", "linear_attention"
MIXED = of(S, F, S, F)
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 32}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
PER_LAYER = {"vocab_size_per_layer_input": SIZES["vocab_size"], "hidden_size_per_layer_input": 8}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
PATCHES = {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "spatial_merge_size": 1}
LATENT = MOE | ROUTED | {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "head_dim": OMIT,
}  # fmt: skip


def served(kind: str, changes: dict[str, Any] = HEADS, extras: str = "", **names: str) -> Architecture:
    """A model of full-attention layers alone."""
    packed = tuple(range(changes.get("num_hidden_layers", SIZES["num_hidden_layers"])))
    return row(kind, Verdict.SERVED, changes, packed=packed, extras=extras, **names)


def partly(kind: str, changes: dict[str, Any], packed: tuple[int, ...], extras: str = "", **names: str) -> Architecture:
    """A model with other layers besides."""
    return row(kind, Verdict.PARTLY, changes, packed=packed, extras=extras, **names)


def refused(kind: str, changes: dict[str, Any], reason: str, **names: str) -> Architecture:
    """A model that Lamina cannot serve."""
    return row(kind, Verdict.REFUSED, changes, reason=reason, **names)


def sighted(kind: str, text: dict[str, Any], vision: dict[str, Any], extras: str = "", **fields: Any) -> Architecture:
    """A model that also sees, given text alone."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    parts = {"text_config": SIZES | text, "vision_config": sizes | {"patch_size": 4} | vision}
    packed = fields.setdefault("packed", (0, 1))
    verdict = Verdict.SERVED if len(packed) == parts["text_config"]["num_hidden_layers"] else Verdict.PARTLY
    names = {"model": f"{kind}ForConditionalGeneration", "extras": f"vision, {extras}".removesuffix(", ")}
    return row(kind, verdict, dict.fromkeys(SIZES, OMIT) | parts, **names | fields)


def row(kind: str, verdict: Verdict, changes: dict[str, Any], **fields: Any) -> Architecture:
    """A row whose classes are named after ``kind`` unless said otherwise."""
    given = {"name": kind, "config": f"{kind}Config", "model": f"{kind}ForCausalLM"} | fields
    return Architecture(verdict=verdict, changes=changes, **given)


ARCHITECTURES: list[Architecture] = [
    # full attention in every layer
    served("Llama"),
    served("Qwen2", {}, "key bias"),
    served("Qwen3", HEADS | {"num_attention_heads": 6}, "normed keys, 3 query heads a KV head"),
    served("Qwen3Moe", MOE, "experts"),
    served("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 32}, "key bias, experts"),
    served("Mistral", HEADS | {"sliding_window": None, "num_key_value_heads": 1}, "one KV head"),
    served("Ministral3", {}, "scaled queries by position"),
    served("Mixtral", MOE | {"sliding_window": None}, "experts"),
    served("Gemma", HEADS | {"num_key_value_heads": 4}, "multi-head"),
    served("Gemma2", of(F, F) | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0}, "capped logits, scaling",
           name="Gemma2 full"),
    served("Phi", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}, "partial RoPE, biases"),
    served("Phi3", {"sliding_window": None}, "one projection of q, k and v"),
    served("Phimoe", MOE | {"sliding_window": None}, "experts, biases"),
    served("Granite", {"attention_multiplier": 0.4}, "scaling"),
    served("GraniteMoe", MOE | {"attention_multiplier": 0.4, "head_dim": OMIT}, "scaling, experts"),
    served("Olmo", {"clip_qkv": 2.0}, "clipped keys and values"),
    served("Olmo2", {}, "keys normed over all heads"),
    served("Olmoe", MOE | {"head_dim": OMIT, "clip_qkv": 2.0}, "normed and clipped keys, experts"),
    served("Cohere", {"use_qk_norm": True, "logit_scale": 1.0}, "interleaved RoPE, normed keys"),
    served("Glm", HEADS | {"attention_bias": True}, "partial interleaved RoPE"),
    served("Glm4", HEADS | {"attention_bias": True}, "partial interleaved RoPE"),
    served("Glm4Moe", MOE | ROUTED, "partial RoPE, experts"),
    served("SmolLM3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}, "layers without RoPE"),
    served("Starcoder2", {"sliding_window": None, "use_bias": True}, "biases"),
    served("StableLm", {"use_qkv_bias": True}, "partial RoPE, biases"),
    served("Nemotron", HEADS, "partial RoPE, biases"),
    served("GPTNeoX", {"num_key_value_heads": OMIT}, "one projection of q, k and v, partial RoPE"),
    served("GPT2", {"n_positions": 4096, "num_key_value_heads": OMIT}, "learned positions", model="GPT2LMHeadModel"),
    served("GPTBigCode", {"n_positions": 4096, "num_key_value_heads": OMIT}, "learned positions, one KV head"),
    served("SeedOss", HEADS | {"attention_bias": True}, "biases"),
    served("Apertus", {}, "normed keys"),
    served("Ernie4_5", HEADS, "interleaved RoPE"),
    served("HunYuanDenseV1", HEADS, "keys normed after RoPE"),
    served("MiniMaxM2", MOE | {"rotary_dim": 16}, "partial RoPE, experts"),
    served("NanoChat", {}, "keys normed after RoPE, capped logits of the vocabulary"),
    served("Helium", {"head_dim": 16}, "interleaved RoPE"),
    served("BitNet", {}, "ternary weights"),
    served("Bert", {"is_decoder": True, "num_key_value_heads": OMIT}, "learned positions", name="BERT decoder",
           model="BertLMHeadModel"),
    served("BioGpt", {"num_key_value_heads": OMIT}, "learned positions"),
    served("Dots1", MOE | ROUTED | {"sliding_window": None}, "normed keys, experts"),
    sighted("Llava", {"model_type": "llama"} | HEADS, {"model_type": "clip_vision_model", "image_size": 16}),
    sighted("Qwen2_5_VL", {"rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}}, PATCHES, "three positions a token",
            name="Qwen2.5-VL"),
    sighted("Qwen3VL", HEADS | {"rope_parameters": ROPE | {"mrope_section": [8, 4, 4]}},
            PATCHES | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}, "three positions a token",
            name="Qwen3-VL"),
    # some layers keep a window, a chunk or a state, or read what an earlier layer stored
    partly("Gemma2", MIXED | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0}, (1, 3),
           "capped logits, scaling, sliding window"),
    partly("Gemma3Text", MIXED | {"query_pre_attn_scalar": 8}, (1, 3), "scaling, sliding window, two RoPEs",
           name="Gemma3", model="Gemma3ForCausalLM"),
    partly("Gemma3nText", of(S, F, S, F, S, F) | PER_LAYER | {
        "num_kv_shared_layers": 2, "laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 6,
    }, (1, 3), "shared keys and values, sliding window", name="Gemma3n", model="Gemma3nForCausalLM"),
    partly("Gemma4Text", of(S, F, S, F, S, F) | PER_LAYER | {
        "num_kv_shared_layers": 2, "global_head_dim": 64,
    }, (1, 3), "several head dimensions, shared keys and values, sliding window",
           name="Gemma4", model="Gemma4ForCausalLM"),
    partly("Gemma4Text", MIXED | PER_LAYER | {
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 64,
    }, (1, 3), "several head dimensions and numbers of KV heads, keys as values, sliding window",
           name="Gemma4 keys as values", model="Gemma4ForCausalLM"),
    partly("VaultGemma", MIXED | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0}, (1, 3),
           "capped logits, sliding window"),
    partly("GptOss", MIXED | MOE, (1, 3), "sink logits, sliding window, experts"),
    partly("Cohere2", MIXED | {"logit_scale": 1.0}, (1, 3), "layers without RoPE, sliding window"),
    partly("Olmo3", MIXED | {"head_dim": OMIT}, (1, 3), "normed keys, sliding window"),
    partly("Exaone4", MIXED, (1, 3), "layers without RoPE, normed keys, sliding window"),
    partly("Qwen2", of(F, F, S, S) | {"use_sliding_window": True, "max_window_layers": 2, "head_dim": OMIT}, (0, 1),
           "key bias, sliding window", name="Qwen2 with a window"),
    partly("Ministral", MIXED, (1, 3), "sliding window"),
    partly("Llama4Text", of(C, F, C, F) | MOE | {
        "attention_chunk_size": WINDOW, "no_rope_layers": [1, 0, 1, 0], "floor_scale": 64, "intermediate_size_mlp": 96,
        "moe_layers": [0, 2], "sliding_window": OMIT,
    }, (1, 3), "layers without RoPE, queries scaled by position, chunks, experts",
           name="Llama4", model="Llama4ForCausalLM", padding=False),
    partly("Afmoe", MIXED | MOE | {"num_dense_layers": 1}, (1, 3), "layers without RoPE, gated output, sliding window"),
    partly("Qwen3Next", of(L, F, L, F) | MOE | DELTA | {"shared_expert_intermediate_size": 32}, (1, 3),
           "gated output, linear attention, experts"),
    partly("Qwen3_5Text", of(L, F, L, F) | DELTA, (1, 3), "gated output, linear attention",
           name="Qwen3.5", model="Qwen3_5ForCausalLM"),
    partly("OlmoHybrid", of(L, F, L, F) | {
        "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "head_dim": OMIT,
    }, (1, 3), "normed keys, linear attention"),
    partly("Lfm2", of("conv", F, "conv", F) | {"head_dim": OMIT}, (1, 3), "normed keys, convolutions"),
    partly("GraniteMoeHybrid", of(L, F, L, F) | MAMBA | MOE | {
        "attention_multiplier": 0.4, "shared_intermediate_size": 32, "head_dim": OMIT,
    }, (1, 3), "scaling, state space, experts"),
    partly("Bamba", MAMBA | {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]}, (1, 3), "state space"),
    partly("Jamba", {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
                     "num_experts_per_tok": 1, "mamba_dt_rank": 4, "use_mamba_kernels": False}, (1, 3),
           "state space, experts, no positions"),
    partly("NemotronH", {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "full_attention"], "num_hidden_layers": OMIT,
        "head_dim": 32, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1,
        "chunk_size": 32, "use_mamba_kernels": False,
    }, (1, 3), "state space, layers without attention, no positions"),
    partly("Lfm2Moe", of("conv", F, "conv", F) | MOE | {"num_dense_layers": 1, "head_dim": OMIT}, (1, 3),
           "normed keys, convolutions, experts"),
    partly("GraniteSWA", MIXED | {"attention_multiplier": 0.4, "head_dim": OMIT}, (1, 3), "scaling, sliding window"),
    partly("Laguna", MIXED | MOE, (1, 3), "gated output, normed keys, sliding window, experts"),
    sighted("Gemma3", MIXED | {"query_pre_attn_scalar": 8}, {"image_size": 16}, "scaling, sliding window",
            packed=(1, 3), name="Gemma3 with vision"),
    sighted("Gemma4", MIXED | PER_LAYER | {"global_head_dim": 64}, {"head_dim": 16, "num_key_value_heads": 2},
            "several head dimensions, sliding window", packed=(1, 3), name="Gemma4 with vision"),
    # models that Lamina cannot serve
    refused("Mistral", {"sliding_window": WINDOW}, "every layer has a sliding window of 96 tokens",
            name="Mistral with a window"),
    refused("Llama", {"head_dim": 72}, "its head dimension is 72; it must be a multiple of 16 up to 512",
            name="Llama, head dimension 72"),
    refused("DeepseekV3", LATENT, "multi-head latent attention already compresses its cache"),
    refused("MiMoV2Flash", of(S, F) | ROUTED | {"head_dim": 32, "v_head_dim": 16, "moe_intermediate_size": 32},
            "its values have 16 channels a head, its keys 32"),
    refused("T5", {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "num_hidden_layers": OMIT,
                   "num_attention_heads": OMIT, "hidden_size": OMIT},
            "it has cross attention; use a decoder-only model", model="T5ForConditionalGeneration"),
    refused("Mamba", {"num_attention_heads": OMIT, "num_key_value_heads": OMIT, "state_size": 16},
            "its configuration names no attention heads or layers"),
    refused("RecurrentGemma", {"attention_window_size": WINDOW, "block_types": ["recurrent", "attention"]},
            "every layer has a sliding window of 96 tokens"),
    refused("Zamba2", {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8,
                       "mamba_d_state": 16, "chunk_size": 32, "adapter_rank": 8, "num_key_value_heads": OMIT},
            "layer 1 needs transformers' LinearAttentionAndFullAttentionLayer"),
    refused("FalconH1", MAMBA | {"mamba_d_ssm": 128},
            "layer 0 needs transformers' LinearAttentionAndFullAttentionLayer"),
    refused("Bert", {"max_position_embeddings": 512}, "looks ahead in layer 0; a cache needs causal attention",
            name="BERT", model="BertLMHeadModel"),
    refused("Falcon", {}, "does not use transformers' attention interface"),
    refused("Bloom", {}, "does not use transformers' attention interface"),
    refused("DiffLlama", {}, "layer 0 attends more than once to the same keys"),
    refused("JetMoe", MOE | {"kv_channels": 16, "head_dim": OMIT},
            "layer 0 attends to keys of 4 KV heads .* configuration tells of 2 KV heads"),
    refused("HrmText", HEADS, r"layers \[2, .*\] did not go through transformers' attention interface"),
    refused("Doge", HEADS, "the attention mask has shape"),
    refused("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": OMIT},
            "layer 0: logits are scaled by 1.0, not 0.25"),
    refused("Bart", {"d_model": 64, "num_hidden_layers": OMIT, "num_attention_heads": OMIT, "hidden_size": OMIT,
                     "num_key_value_heads": OMIT, "decoder_layers": 2, "encoder_layers": 2, "decoder_ffn_dim": 96,
                     "decoder_attention_heads": 4, "encoder_attention_heads": 4, "is_decoder": True}, "looks ahead"),
]  # fmt: skip
