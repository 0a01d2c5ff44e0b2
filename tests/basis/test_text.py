import gzip
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from lamina.basis.text import digest, load_documents, token_sequences
from lamina.errors import ConfigError, DataError


class LetterTokenizer:
    """One token a character; ids of the special tokens are chosen by the test."""

    def __init__(self, *, bos: int | None = None, eos: int | None = None, adds_bos: bool = False):
        self.bos_token_id, self.eos_token_id, self.adds_bos = bos, eos, adds_bos
        self.texts: list[str] = []

    def __call__(self, text, *, add_special_tokens=True, verbose=True):
        self.texts.append(text)
        prefix = [self.bos_token_id] if add_special_tokens and self.adds_bos else []
        return {"input_ids": prefix + [ord(letter) for letter in text]}


def write(path: Path, records) -> str:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return str(path)


def test_default_text_is_deterministic_english():
    documents = load_documents("default")
    assert documents == load_documents("default")
    assert sum(map(len, documents)) > 1_000_000
    assert max(map(len, documents)) < 40_000
    assert any("with" in document and "statement" in document for document in documents)


def test_default_text_skips_what_this_python_lacks(monkeypatch):
    everything = load_documents("default")
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    monkeypatch.setattr("lamina.basis.text._CODE_MODULES", ("no_such_module", "no_such.package", "itertools", "heapq"))
    documents = load_documents("default")
    assert 0 < len(documents) < len(everything)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"text": "a", "other": "b"}, "a"),
        ({"body": "a", "id": 3}, "a"),
        ({"question": "a", "answer": "b"}, "a\nb"),
        ({"prompt": "a", "completion": "b", "id": "x"}, "a\nb"),
        ({"id": "x", "prompt": "a", "canonical_solution": "b", "test": "t"}, "a\nb"),
        ({"id": "x", "messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": None}]}, "a"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "a\nb"),
        ({"traj": ["a", "b"]}, "a\nb"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "a"),
        ("a", "a"),
    ],
)
def test_the_text_of_a_record_is_found(tmp_path, record, expected):
    assert load_documents(write(tmp_path / "data.jsonl", [record])) == [expected]


@pytest.mark.parametrize(
    ("field", "expected"),
    [("input", "a"), ("input+code", "a\nb"), ("code + input", "b\na"), ("target+note", "-1.5"), ("steps", "x\ny")],
)
def test_named_fields_are_joined(tmp_path, field, expected):
    record = {"input": "a", "code": "b", "target": -1.5, "note": None, "steps": ["x", "y"]}
    assert load_documents(write(tmp_path / "data.jsonl", [record]), field=field) == [expected]


def test_file_kinds(tmp_path):
    records = [{"text": "one"}, {"text": "  "}, {"text": "tw\u00f6"}]
    plain = write(tmp_path / "data.jsonl", records)
    zipped = tmp_path / "data.jsonl.gz"
    zipped.write_bytes(gzip.compress(Path(plain).read_bytes(), mtime=0))
    listed = tmp_path / "data.json"
    listed.write_text(json.dumps(records))
    for path in (plain, zipped, listed):
        assert load_documents(str(path)) == ["one", "tw\u00f6"]


def test_text_file_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path):
    text = "\n\n".join(f"paragraph {number} " + "word " * 50 for number in range(300))
    path = tmp_path / "book.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    documents = load_documents(str(path))
    assert len(documents) > 3
    assert max(map(len, documents)) <= 16_000
    assert "\n\n".join(documents) == text


def test_half_surrogates_become_valid_text(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a\\ud800b"}\n')
    assert load_documents(str(path)) == ["a?b"]


@pytest.mark.parametrize(
    ("name", "content", "field", "message"),
    [
        ("bad.jsonl", b'{"text": "a"}\n\n{"text": \n', None, "line 3 is not JSON"),
        ("gap.jsonl", b'{"text": "a"}\n{"body": "a"}\n', None, "line 2: no field 'text' among 'body'"),
        ("two.jsonl", b'{"a": "x", "b": "y"}\n', None, "which of the fields 'a', 'b'.*--field"),
        ("named.jsonl", b'{"a": "x"}\n', "a+c", "line 1: no field 'c' among 'a'"),
        ("kind.jsonl", b'{"a": true, "b": {"deep": 1}}\n', "b", "line 1, field 'b'.*'deep'"),
        ("number.jsonl", b"17\n", None, "line 1: expected a record"),
        ("object.json", b'{"text": "a"}', None, "must hold a JSON list"),
        ("bad.json", b"[1,", None, "is not JSON"),
        ("empty.txt", b" \n\n", None, "holds no text"),
        ("empty.jsonl", b"", None, "holds no text"),
        ("binary.txt", b"abc\xff\xfe", None, "not UTF-8.*byte 3"),
        ("cut.txt.gz", gzip.compress(b"hello" * 99, mtime=0)[:-12], None, "cannot read"),
        ("plain.txt.gz", b"hello", None, "cannot read"),
        ("plain.txt", b"hello", "text", "no field 'text'"),
    ],
)
def test_what_cannot_be_read_says_where_and_what_to_do(tmp_path, name, content, field, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_documents(str(path), field=field)
    assert name in str(caught.value)


@pytest.mark.parametrize("source", ["missing.jsonl", "./missing", "~/no/such/file", "/no/such/file"])
def test_missing_file(source):
    with pytest.raises(DataError, match="no file"):
        load_documents(source)


def test_folder_is_not_a_text_file(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        load_documents(str(tmp_path))


def test_data_set_needs_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'lamina-kv\[data\]'"):
        load_documents("owner/name")


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("owner/name", ("owner/name", None, "train")),
        ("owner/name:main", ("owner/name", "main", "train")),
        ("owner/name:main@test[:2]", ("owner/name", "main", "test[:2]")),
    ],
)
def test_data_set_names(monkeypatch, source, call):
    calls = []

    def load_dataset(name, config, *, split):
        calls.append((name, config, split))
        return [{"text": "a"}, {"text": "b"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert load_documents(source) == ["a", "b"]
    assert calls == [call]


def test_data_set_that_cannot_be_loaded(monkeypatch):
    def load_dataset(name, config, *, split):
        raise ConnectionError("offline")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError, match=r"'owner/name'.*offline"):
        load_documents("owner/name")


def text_of(sequences) -> str:
    return "".join(chr(token) for sequence in sequences for token in sequence.flatten().tolist())


def test_sequences_join_documents_with_the_separator():
    documents = ["aaaa", "bbbb", "cccc"]
    sequences = list(token_sequences(documents, LetterTokenizer(eos=ord("|")), seq_len=7, max_tokens=100, seed=0))
    assert all(sequence.shape == (1, 7) and sequence.dtype == torch.int64 for sequence in sequences)
    assert sorted(text_of(sequences).split("|")) == sorted(documents)


@pytest.mark.parametrize(("special", "separator"), [({"bos": 62, "eos": 124}, "|"), ({"bos": 62}, ">"), ({}, "")])
def test_separator_is_eos_else_bos_else_nothing(special, separator):
    (sequence,) = token_sequences(["aa", "aa"], LetterTokenizer(**special), seq_len=4, max_tokens=4, seed=0)
    assert text_of([sequence]) == ("aa" + separator + "aa")[:4]


def test_every_sequence_begins_with_bos_where_the_tokenizer_adds_one():
    tokenizer = LetterTokenizer(bos=ord(">"), eos=ord("|"), adds_bos=True)
    sequences = list(token_sequences(["abcdefgh"], tokenizer, seq_len=3, max_tokens=100, seed=0))
    assert [text_of([sequence]) for sequence in sequences] == [">ab", ">cd", ">ef", ">gh"]


def test_sequences_stop_at_max_tokens_and_tokenise_no_more_than_needed():
    tokenizer = LetterTokenizer(eos=0)
    sequences = list(token_sequences(["x" * 10] * 50, tokenizer, seq_len=4, max_tokens=23, seed=0))
    assert len(sequences) == 5
    assert len(tokenizer.texts) < 5


def test_shuffle_follows_the_seed():
    documents = [letter * 4 for letter in "abcdefghij"]
    tokenizer = LetterTokenizer()
    first, again, other = (
        text_of(token_sequences(documents, tokenizer, seq_len=4, max_tokens=40, seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert sorted(first) == sorted(other) == sorted("".join(documents))


def test_too_little_text_or_too_few_tokens():
    with pytest.raises(DataError, match="hold 6 tokens, less than one sequence of 10"):
        list(token_sequences(["abc", "def"], LetterTokenizer(), seq_len=10, max_tokens=100, seed=0))
    with pytest.raises(ConfigError, match="max_tokens is 5"):
        token_sequences(["abc"], LetterTokenizer(), seq_len=10, max_tokens=5, seed=0)
    with pytest.raises(ConfigError, match="seq_len is 1"):
        token_sequences(["abc"], LetterTokenizer(), seq_len=1, max_tokens=5, seed=0)


def test_digest_tells_documents_and_their_boundaries_apart():
    assert digest(["a", "b"]) == digest(iter(["a", "b"]))
    assert len({digest(["a", "b"]), digest(["b", "a"]), digest(["ab"]), digest(["a", "b", ""])}) == 4
