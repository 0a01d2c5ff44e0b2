"""Tiny random models of several architectures, and profiles calibrated on random tokens."""

from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from lamina.basis.calibrate import calibrate
from lamina.basis.profile import Profile

VOCAB = 128
PAD = 0
"""Never in a prompt, so that generate() infers no padding."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "attention_dropout": 0.0,
    "pad_token_id": PAD,
    "eos_token_id": None,
    "bos_token_id": None,
}

SPECIAL: dict[str, dict[str, Any]] = {
    "Llama": {"head_dim": 32},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32, "num_attention_heads": 6},
    "Mistral": {"sliding_window": None, "num_key_value_heads": 1},
    "Phi": {"partial_rotary_factor": 0.5, "num_key_value_heads": 4},
    "Phi3": {"sliding_window": None},
    "Granite": {"attention_multiplier": 0.4},
}
KINDS = list(SPECIAL)


def config(kind: str, **changes: Any) -> transformers.PretrainedConfig:
    """Configuration of a tiny model."""
    return getattr(transformers, f"{kind}Config")(**{**SIZES, **SPECIAL.get(kind, {}), **changes})


def build(kind: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A fresh model in evaluation mode, float32 unless changed."""
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config(kind, **changes))
    for name, p in model.named_parameters():
        if name.endswith("k_proj.bias"):
            torch.nn.init.normal_(p, std=2.0)
        elif name.endswith("bias"):
            torch.nn.init.normal_(p, std=0.2)
    return model.eval()


def tokens(batch: int, n: int, seed: int = 0) -> Tensor:
    """Random prompts without padding."""
    return torch.randint(1, VOCAB, (batch, n), generator=torch.Generator().manual_seed(seed))


@cache
def profile_of(kind: str) -> Profile:
    """Profile of ``build(kind)``."""
    data = [tokens(2, 384, seed) for seed in (100, 101)]
    return calibrate(build(kind), data, model_id=kind)


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> Tensor:
    """Logits ``[B, T, vocab]`` of one forward pass."""
    return model(input_ids=ids, **kwargs).logits
