"""A tiny Llama with a byte-level tokenizer in a folder, and its profile; nothing is downloaded."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from lamina import cli
from lamina.basis.calibrate import CalibrationConfig, calibrate

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
SPECIALS = ["<s>", "</s>"]


@dataclass(frozen=True)
class Tiny:
    """Folder of the model and file of its profile."""

    model: str
    profile: str


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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    model = make_model()
    model.save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    ids = torch.randint(2, 258, (4, 1, 256), generator=torch.Generator().manual_seed(0))
    profile = calibrate(model, iter(ids), CalibrationConfig(tiers=(4, 2)))
    profile.save(folder / "tiny.safetensors")
    return Tiny(str(folder / "model"), str(folder / "tiny.safetensors"))


@pytest.fixture(scope="session")
def other(tmp_path_factory) -> Tiny:
    """A model that the tiny profile does not fit, without a chat template."""
    folder = tmp_path_factory.mktemp("other")
    make_model(layers=1, positions=128).save_pretrained(folder)
    make_tokenizer(None).save_pretrained(folder)
    return Tiny(str(folder), "")


@pytest.fixture
def lamina():
    """Run a command, as its options would be typed."""

    def run(*args: object, stdin: str | None = None):
        return CliRunner().invoke(cli.app, [str(a) for a in args], input=stdin, env={"COLUMNS": "200"})

    return run


@pytest.fixture
def refused(lamina):
    """Run a command that must fail with a message that holds certain words, and leave stdout empty."""

    def run(*args: object, words: str, stdin: str | None = None) -> None:
        result = lamina(*args, stdin=stdin)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        last = result.stderr.splitlines()[-1]
        assert last.startswith("Error: ")
        assert all(word in last for word in words.split()), last

    return run


@pytest.fixture
def text_file(tmp_path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"Paragraph {i} says {i * i} and then no more." for i in range(600)))
    return file
