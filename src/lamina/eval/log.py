"""What an evaluation has done so far: one JSON line a record, appended and never changed, so that it can go on."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.errors import DataError


def digest(settings: Mapping[str, Any]) -> str:
    """Short hash of a run's settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


class Log:
    """Records of one run.

    Parameters
    ----------
    path : Path
        The file; a last line that an interruption cut short is taken off.
    settings : mapping
        What the records depend on.

    Raises
    ------
    DataError
        The file cannot be read or written, or belongs to a run with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, dict(settings)
        self.records: list[dict[str, Any]] = []
        head = {"run": digest(settings), "settings": self.settings}
        try:
            data = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise DataError(f"cannot go on with {path}: {error}. Choose another folder.") from error
        lines = data.splitlines(keepends=True)
        cut = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        if not lines:
            if not (json.dumps(head).encode() + b"\n").startswith(cut):
                raise DataError(f"{path} is no log of an evaluation; choose another folder")
            self._shorten(0)
            self._write(head)
            return
        found, *self.records = [_parse(path, number, line) for number, line in enumerate(lines, 1)]
        if found.get("run") != head["run"]:
            before = found.get("settings")
            known = before if isinstance(before, dict) else {}
            differing = [k for k, value in self.settings.items() if known.get(k) != json.loads(json.dumps(value))]
            raise DataError(
                f"{path} is of a run with other settings ({', '.join(differing) or 'unknown'}); choose another folder, "
                "or the settings that it was begun with"
            )
        if cut:
            self._shorten(len(data) - len(cut))

    def append(self, record: dict[str, Any]) -> None:
        """Write a record, for good once this returns."""
        self.records.append(self._write(record))

    def of(self, **fields: Any) -> list[dict[str, Any]]:
        """Records with these fields, in the order in which they were written."""
        return [r for r in self.records if all(r.get(k) == v for k, v in fields.items())]

    def _shorten(self, n_bytes: int) -> None:
        if self.path.exists():
            os.truncate(self.path, n_bytes)

    def _write(self, record: dict[str, Any]) -> dict[str, Any]:
        """Append a line; returns the record as it will be read back."""
        line = json.dumps(record)
        try:
            with self.path.open("ab") as file:
                file.write(line.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error}. Free some space, or choose another folder.") from error
        written: dict[str, Any] = json.loads(line)
        return written


@dataclass(frozen=True)
class Written:
    """A log as it was found, by someone who does not go on with it.

    Attributes
    ----------
    path : Path
        The file, which is left as it is.
    settings : dict
        What the records depend on.
    records : list of dict
        All whole ones; ``cut`` says that the last line is not, as after an interruption or while the run goes on.
    """

    path: Path
    settings: dict[str, Any]
    records: list[dict[str, Any]]
    cut: bool = False

    def of(self, **fields: Any) -> list[dict[str, Any]]:
        """Records with these fields, in the order in which they were written."""
        return [r for r in self.records if all(r.get(k) == v for k, v in fields.items())]


def read_log(path: Path) -> Written:
    """Read a log whatever its settings; DataError if it is none, or is damaged."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error
    cut = bool(lines) and not lines[-1].endswith(b"\n")
    if len(lines) == cut:
        raise DataError(f"{path} holds nothing yet; run `lamina evaluate` with its folder first")
    head, *records = [_parse(path, number, line) for number, line in enumerate(lines[: len(lines) - cut], 1)]
    settings = head.get("settings")
    if not isinstance(settings, dict) or head.get("run") != digest(settings):
        raise DataError(
            f"{path} is no log of an evaluation: its first line has no settings, or not those it was made with"
        )
    return Written(path, settings, records, cut)


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"{path} line {number} is damaged ({error}); delete the line to answer its prompt again"
        ) from error
    if not isinstance(record, dict):
        raise DataError(f"{path} line {number} is no record of an evaluation; delete it, or choose another folder")
    return record
