import pytest
import torch

from lamina.app import data
from lamina.app.data import Source, calibration_sources, evaluation_source, mixed_sequences, read_sources, split
from lamina.basis.text import load_documents
from lamina.errors import ConfigError, DataError
from tiny_llama import make_tokenizer


def source(name: str, letter: str, documents: int, size: int = 100) -> Source:
    return Source(name, [letter * size for _ in range(documents)])


def letters(sequences) -> str:
    """The letter that each sequence is made of (tokens are bytes)."""
    tokenizer = make_tokenizer()
    return "".join(tokenizer.decode(s[0], skip_special_tokens=True)[0] for s in sequences)


def mix(sources, tokens, seq_len=50):
    return letters(mixed_sequences(sources, make_tokenizer(), seq_len=seq_len, tokens=tokens, seed=0))


def test_sources_take_turns():
    assert mix([source("a", "a", 9), source("b", "b", 9), source("c", "c", 9)], 350) == "abcabca"


def test_when_one_source_runs_out_the_others_go_on():
    assert mix([source("a", "a", 9), source("b", "b", 1)], 350) == "ababaaa"


def test_tokens_are_reached_in_whole_sequences():
    assert len(mix([source("a", "a", 9)], 151)) == 4
    assert len(mix([source("a", "a", 9)], 10_000)) == (9 * 101 - 1) // 50


def test_a_source_too_short_is_named():
    with pytest.raises(DataError, match=r"short\.txt: .*less than one sequence"):
        mix([source("a", "a", 9), source("short.txt", "b", 1, size=10)], 350)


def test_the_seed_decides_the_order():
    documents = Source("many", [chr(ord("a") + i) * 60 for i in range(20)])

    def order(seed):
        return letters(mixed_sequences([documents], make_tokenizer(), seq_len=61, tokens=600, seed=seed))

    assert order(1) == order(1) != order(2)


@pytest.mark.parametrize("documents", [2, 7, 8, 9, 16, 100])
def test_split_holds_out_every_eighth(documents):
    kept, held = split(Source("s", [str(i) for i in range(documents)]))
    assert len(held.documents) == max(1, documents // 8)
    assert sorted(kept.documents + held.documents, key=int) == [str(i) for i in range(documents)]
    assert kept.name == held.name == "s"


def test_one_document_cannot_be_split():
    with pytest.raises(DataError, match="one document"):
        split(Source("s", ["alone"]))


def test_the_default_text_is_measured_where_it_is_not_calibrated(monkeypatch):
    everything = load_documents("default")
    monkeypatch.setattr(data, "load_documents", lambda name, field: everything)
    (calibrated,) = calibration_sources(["default"])
    measured = evaluation_source("default")
    assert len(calibrated.documents) + len(measured.documents) == len(everything)
    assert sorted(calibrated.documents + measured.documents) == sorted(everything)


def test_a_file_is_used_whole(text_file):
    everything = load_documents(str(text_file))
    assert calibration_sources([str(text_file)])[0].documents == everything
    assert evaluation_source(str(text_file)).documents == everything


def test_a_source_named_twice():
    with pytest.raises(ConfigError, match="default is given more than once"):
        read_sources(["default", "default"])


def test_sequences_are_int64_rows():
    (row,) = mixed_sequences([source("a", "a", 1)], make_tokenizer(), seq_len=50, tokens=50, seed=0)
    assert row.dtype == torch.int64
    assert row.shape == (1, 50)
