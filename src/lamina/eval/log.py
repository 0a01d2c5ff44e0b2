"""What an evaluation has done so far: one JSON line a record, appended and never changed, so that it can go on."""

import hashlib
import json
import os
from collections.abc import Mapping
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
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            if lines and not lines[-1].endswith(b"\n"):
                os.truncate(path, sum(map(len, lines[:-1])))
                lines.pop()
            if not lines:
                self._write(head)
                return
            found, *self.records = [json.loads(line) for line in lines]
        except (OSError, ValueError) as error:
            raise DataError(f"cannot go on with {path}: {error}. Choose another folder.") from error
        if found.get("run") != head["run"]:
            before = found.get("settings", {})
            differing = [k for k, value in self.settings.items() if before.get(k) != json.loads(json.dumps(value))]
            raise DataError(
                f"{path} is of a run with other settings ({', '.join(differing) or 'unknown'}); choose another folder, "
                "or the settings that it was begun with"
            )

    def append(self, record: dict[str, Any]) -> None:
        """Write a record, for good once this returns."""
        self.records.append(self._write(record))

    def of(self, **fields: Any) -> list[dict[str, Any]]:
        """Records with these fields, in the order in which they were written."""
        return [r for r in self.records if all(r.get(k) == v for k, v in fields.items())]

    def _write(self, record: dict[str, Any]) -> dict[str, Any]:
        """Append a line; returns the record as it will be read back."""
        line = json.dumps(record)
        with self.path.open("ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        written: dict[str, Any] = json.loads(line)
        return written
