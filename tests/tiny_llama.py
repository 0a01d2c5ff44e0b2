"""A tiny Llama and a byte-level tokenizer, made on the spot."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lamina.basis.calibrate import calibrate

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
SPECIALS = ["<s>", "</s>"]


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(SPECIALS + alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>", chat_template=template
    )


def make_model(layers: int = 2, positions: int = 4096) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIALS) + 256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=positions,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


def save_tiny(model_folder: Path, profile: Path, **calibration: Any) -> None:
    """Write the model with its tokenizer, and its profile."""
    model = make_model()
    model.save_pretrained(model_folder)
    make_tokenizer().save_pretrained(model_folder)
    ids = torch.randint(2, 258, (4, 1, 256), generator=torch.Generator().manual_seed(0))
    calibrate(model, iter(ids), **calibration).save(profile)
