"""What ``lamina inspect`` does: find out what kind of file Lamina wrote, and what is in it, without a model."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lamina.app.cache_facts import CacheFacts, cache_facts
from lamina.app.profile_facts import ProfileFacts, profile_facts
from lamina.app.stored import StoredFile, StoredTensor
from lamina.errors import ConfigError

Facts = ProfileFacts | CacheFacts

EXPECTED = "name a profile made by `lamina calibrate`, or a saved cache"
KINDS: dict[str, Callable[[StoredFile], Facts]] = {"lamina-profile": profile_facts, "lamina-cache": cache_facts}


@dataclass(frozen=True)
class Inspection:
    """A file, its kind and size, and the facts of its kind."""

    file: str
    format: str
    file_bytes: int
    facts: Facts

    def as_json(self) -> dict[str, Any]:
        """The document that ``--json`` writes."""
        facts = asdict(self.facts)
        return {"file": self.file, "format": self.format, "file_bytes": self.file_bytes, **facts}


def inspect_file(path: Path) -> Inspection:
    """Inspect a profile or a saved cache.

    Raises
    ------
    ConfigError
        There is no such file, or Lamina did not write it.
    ProfileError
        It is a damaged profile.
    """
    stored = read_stored(path)
    kind = stored.meta.get("format")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{path} is of the format {kind!r}, which this Lamina does not know; {EXPECTED}")
    return Inspection(str(path), kind, path.stat().st_size, KINDS[kind](stored))


def read_stored(path: Path) -> StoredFile:
    """Metadata and tensor shapes of a file that Lamina wrote; no tensor is read."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; {EXPECTED}")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("lamina")
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            tensors = {name: StoredTensor(tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is no safetensors file ({error}); {EXPECTED}") from error
    try:
        meta = json.loads(text or "null")
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: its metadata is damaged ({error}); make the file again") from error
    if not isinstance(meta, dict):
        raise ConfigError(f"{path} is a safetensors file, but Lamina did not write it; {EXPECTED}")
    return StoredFile(path, meta, tensors)
