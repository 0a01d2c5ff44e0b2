"""Text for calibration and evaluation: from files, from data set names, or from what every Python carries."""

import ast
import gzip
import hashlib
import importlib
import importlib.abc
import importlib.util
import json
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lamina.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_SOURCE = "default"

# Fields tried, in this order, when none is named.
_FIELD_CHOICES = (
    ("text",),
    ("question", "answer"),
    ("prompt", "completion"),
    ("prompt", "canonical_solution"),
    ("messages",),
    ("conversation",),
    ("conversations",),
    ("traj",),
)
_CONVERSATIONS = frozenset({"messages", "conversation", "conversations", "traj"})
_MESSAGE_KEYS = ("content", "value", "text")
_FILE_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py", ".json", ".jsonl", ".gz", ".csv", ".tsv", ".parquet"})
_PIECE_CHARS = 16_000

_PROSE_MODULES = (
    *("argparse", "asyncio.events", "asyncio.locks", "asyncio.tasks", "calendar", "collections", "concurrent.futures"),
    *("configparser", "contextlib", "csv", "dataclasses", "datetime", "difflib", "doctest", "email.message", "enum"),
    *("fractions", "ftplib", "functools", "gettext", "http.client", "http.cookies", "imaplib", "inspect", "ipaddress"),
    *("logging", "logging.handlers", "mailbox", "numbers", "optparse", "pathlib", "pdb", "pickle", "pickletools"),
    *("random", "sched", "shutil", "smtplib", "socket", "statistics", "string", "subprocess", "tarfile", "tempfile"),
    *("threading", "timeit", "traceback", "typing", "unittest.case", "unittest.mock", "urllib.request", "zipfile"),
)
_CODE_MODULES = (
    *("base64", "bisect", "cmd", "colorsys", "copy", "fileinput", "fnmatch", "graphlib", "heapq", "html.parser"),
    *("json.decoder", "json.encoder", "netrc", "pprint", "queue", "quopri", "reprlib", "shlex", "textwrap", "wave"),
)


def load_documents(source: str, *, field: str | None = None) -> list[str]:
    """Read the documents of a text source.

    Parameters
    ----------
    source
        ``"default"`` (English text and code that every Python carries), the path of a text file, of a ``.jsonl`` or
        ``.json`` (list) file, any of them also as ``.gz``, or a Hugging Face data set as ``name``, ``name:config``,
        with an optional ``@split`` (``train`` unless told; slices such as ``@train[:2000]`` work).
    field
        The field of each JSON or data set record to read; ``"question+answer"`` joins several with a newline. A field
        may hold a string, a number, or a list of strings or of messages, whose contents are joined with newlines.
        Unless told: ``text``, a question and its answer, a conversation, or the only field that holds a string.

    Returns
    -------
    list[str]
        The documents that are not blank, in the order of the source. Text files and the default text are cut at blank
        lines into pieces of about 16,000 characters.

    Raises
    ------
    DataError
        The source is missing, unreadable, not what its name says, lacks the field, or holds no text.
    """
    if source == DEFAULT_SOURCE:
        documents: Iterable[str] = _default_documents()
    elif (path := Path(source).expanduser()).exists():
        documents = _file_documents(path, field)
    elif path.is_absolute() or source.startswith((".", "~")) or path.suffix in _FILE_SUFFIXES:
        raise DataError(f"no file {source} (working directory {Path.cwd()}). Check the path.")
    else:
        documents = _record_documents(_dataset_records(source), field)
    found = [_valid_unicode(document) for document in documents if document.strip()]
    if not found:
        raise DataError(f"{source} holds no text. Name a source that does, or another field with --field.")
    return found


def token_sequences(
    documents: Sequence[str], tokenizer: "PreTrainedTokenizerBase", *, seq_len: int, max_tokens: int, seed: int
) -> Iterator[torch.Tensor]:
    """Shuffle, tokenise and join documents, and cut the stream into sequences of one length.

    Documents follow each other with the tokenizer's end-of-sequence token between them (its beginning-of-sequence token
    if it has no other, nothing if it has neither). Where the tokenizer starts a text with its beginning-of-sequence
    token, so does every sequence. A shorter rest at the end is dropped.

    Parameters
    ----------
    documents
        Texts; tokenised one by one, only as many as are needed.
    tokenizer
        A transformers tokenizer.
    seq_len
        Tokens in a sequence, at least 2.
    max_tokens
        Upper bound of the tokens in all sequences together, at least ``seq_len``.
    seed
        Seed of the shuffle.

    Yields
    ------
    torch.Tensor
        int64 [1, seq_len] token ids.

    Raises
    ------
    ConfigError
        ``seq_len`` or ``max_tokens`` is too small.
    DataError
        The documents do not fill even one sequence.
    """
    if seq_len < 2:
        raise ConfigError(f"seq_len is {seq_len}; it must be at least 2.")
    if max_tokens < seq_len:
        raise ConfigError(f"max_tokens is {max_tokens}, less than one sequence of {seq_len} tokens. Raise it.")
    return _sequences(documents, tokenizer, seq_len, max_tokens // seq_len, seed)


def digest(documents: Iterable[str]) -> str:
    """SHA-256 (hex) of the documents in their order; the boundaries between them count."""
    sha = hashlib.sha256()
    for document in documents:
        data = document.encode("utf-8", "surrogatepass")
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)
    return sha.hexdigest()


def _sequences(
    documents: Sequence[str], tokenizer: "PreTrainedTokenizerBase", seq_len: int, count: int, seed: int
) -> Iterator[torch.Tensor]:
    prefix = _sequence_prefix(tokenizer)
    separator = _separator(tokenizer)
    body = seq_len - len(prefix)
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    pending: list[int] = []
    done = seen = 0
    for index in order:
        ids = tokenizer(documents[index], add_special_tokens=False, verbose=False)["input_ids"]
        seen += len(ids)
        pending += (separator if pending or done else []) + ids
        whole = min(len(pending) // body, count - done)
        for start in range(0, whole * body, body):
            yield torch.tensor([prefix + pending[start : start + body]], dtype=torch.int64)
        del pending[: whole * body]
        done += whole
        if done == count:
            return
    if not done:
        raise DataError(
            f"the {len(documents)} documents hold {seen} tokens, less than one sequence of {seq_len}. "
            "Give more text, or lower the sequence length."
        )


def _sequence_prefix(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def _separator(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    candidates = (tokenizer.eos_token_id, tokenizer.bos_token_id)
    return next(([token] for token in candidates if token is not None), [])


def _valid_unicode(text: str) -> str:
    """Half a surrogate pair, which JSON escapes may hold but no tokenizer takes, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text at blank lines, so that a shuffle draws from all of it."""
    piece: list[str] = []
    size = 0
    for paragraph in text.split("\n\n"):
        if piece and size + len(paragraph) > _PIECE_CHARS:
            yield "\n\n".join(piece)
            piece, size = [], 0
        piece.append(paragraph)
        size += len(paragraph) + 2
    yield "\n\n".join(piece)


def _default_documents() -> Iterator[str]:
    """Language reference, documentation and source of the standard library, as far as this Python has them."""
    try:
        topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        topics = {}
    for name in sorted(topics):
        yield from _pieces(topics[name])
    for name in _PROSE_MODULES:
        yield from _pieces(_docstrings(_module_source(name)))
    for name in _CODE_MODULES:
        yield from _pieces(_module_source(name))


def _module_source(name: str) -> str:
    try:
        spec = importlib.util.find_spec(name)
        loader = spec.loader if spec else None
        return (loader.get_source(name) or "") if isinstance(loader, importlib.abc.InspectLoader) else ""
    except (ImportError, OSError):
        return ""


def _docstrings(source: str) -> str:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return "\n\n".join(text for node in nodes if (text := ast.get_docstring(node)))


def _file_documents(path: Path, field: str | None) -> Iterable[str]:
    kind = Path(path.name.removesuffix(".gz")).suffix
    text = _read_text(path)
    if kind == ".jsonl":
        return _record_documents(_json_lines(path, text), field)
    if kind == ".json":
        return _record_documents(_json_list(path, text), field)
    if field is not None:
        raise DataError(f"{path} is read as plain text, which has no field {field!r}. Leave --field out.")
    return _pieces(text)


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}). Convert it to UTF-8 text or JSONL.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}. Name a readable text, .jsonl, .json or .gz file.") from error


def _json_lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path} line {number}", json.loads(line)
        except ValueError as error:
            raise DataError(f"{path} line {number} is not JSON ({error}). Write one JSON object a line.") from error


def _json_list(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        records = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}. One object a line is a .jsonl file.") from error
    if not isinstance(records, list):
        raise DataError(f"{path} must hold a JSON list of records, not {_kind(records)}. Save the list itself.")
    return ((f"{path} record {number}", record) for number, record in enumerate(records, start=1))


def _dataset_records(source: str) -> Iterator[tuple[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            f"there is no file {source}; to read it as a Hugging Face data set: pip install 'lamina-kv[data]'"
        ) from error
    name_and_config, _, split = source.partition("@")
    name, _, config = name_and_config.partition(":")
    try:
        rows = load_dataset(name, config or None, split=split or "train")
    except Exception as error:
        raise DataError(
            f"there is no file {source}, and the Hugging Face data set {name!r} (config {config or 'none'}, split "
            f"{split or 'train'}) cannot be loaded: {error}. Check the name, written name:config@split."
        ) from error
    return ((f"{source} record {number}", row) for number, row in enumerate(rows, start=1))


def _record_documents(records: Iterable[tuple[str, Any]], field: str | None) -> Iterator[str]:
    names = tuple(name.strip() for name in field.split("+")) if field is not None else None
    for where, record in records:
        if isinstance(record, str) and field is None:
            yield record
            continue
        if not isinstance(record, dict):
            raise DataError(f"{where}: expected a record with named fields, found {_kind(record)}.")
        names = names or _choose_fields(record, where)
        for name in names:
            if name not in record:
                raise DataError(f"{where}: no field {name!r} among {_listed(record)}. Choose with --field (a+b joins).")
        parts = (_flatten(record[name], f"{where}, field {name!r}") for name in names)
        yield "\n".join(part for part in parts if part)


def _choose_fields(record: Mapping[str, Any], where: str) -> tuple[str, ...]:
    for names in _FIELD_CHOICES:
        kind = list if names[0] in _CONVERSATIONS else str
        if all(isinstance(record.get(name), kind) for name in names):
            return names
    strings = [name for name, value in record.items() if isinstance(value, str)]
    if len(strings) != 1:
        raise DataError(
            f"{where}: cannot tell which of the fields {_listed(record)} is the text. "
            "Choose with --field NAME, or join several with --field NAME+NAME."
        )
    return (strings[0],)


def _flatten(value: Any, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list | tuple):
        return "\n".join(text for item in value if (text := _flatten(item, where)))
    if isinstance(value, dict):
        key = next((key for key in _MESSAGE_KEYS if key in value), None)
        if key is not None:
            return _flatten(value[key], where)
        raise DataError(f"{where}: a message has none of {_listed(_MESSAGE_KEYS)}, only {_listed(value)}.")
    raise DataError(f"{where}: expected text, found {_kind(value)}. Choose another field with --field.")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), f"a {type(value).__name__}")
