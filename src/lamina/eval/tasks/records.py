"""Records of a JSONL file, and which of them a seed gets."""

import gzip
import json
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from lamina.errors import ConfigError, DataError

T = TypeVar("T")
_ORDER_SEED = 0


def read_records(path: Path, fields: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Read a ``.jsonl`` or ``.jsonl.gz`` file.

    Parameters
    ----------
    path : Path
        The file, one JSON object a line.
    fields : sequence of sequence of str
        Sets of fields; every record has all fields of one of them.

    Raises
    ------
    DataError
        The file cannot be read, is not JSONL, or a record lacks fields.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}. Name a readable .jsonl or .jsonl.gz file.") from error
    records = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path} line {number} is not JSON ({error}). Write one JSON object a line.") from error
        if not isinstance(record, dict) or not any(set(names) <= set(record) for names in fields):
            needed = " or ".join(", ".join(names) for names in fields)
            raise DataError(f"{path} line {number} has not the fields {needed}. Name a file of this task's format.")
        records.append(record)
    return records


def shuffled(records: Sequence[T]) -> list[T]:
    """All records in one order that never changes."""
    return random.Random(_ORDER_SEED).sample(records, len(records))


def draw(records: Sequence[T], n: int, seed: int) -> list[T]:
    """The ``seed``-th ``n`` records: seeds 0, 1, ... share none until all records are drawn, then it starts again.

    Raises
    ------
    ConfigError
        ``n`` is not positive, or ``seed`` negative.
    DataError
        There are fewer than ``n`` records.
    """
    if n < 1 or seed < 0:
        raise ConfigError(f"n is {n} and seed is {seed}; n must be at least 1 and seed at least 0.")
    if n > len(records):
        raise DataError(f"{n} items are wanted, but the file has only {len(records)} to draw from. Lower n.")
    return [records[(seed * n + i) % len(records)] for i in range(n)]
