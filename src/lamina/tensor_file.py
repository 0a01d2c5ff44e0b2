"""The files Lamina keeps: safetensors with a JSON document in the header."""

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

KEY, SUM = "lamina", "crc32"
UNREADABLE = (SafetensorError, OSError, json.JSONDecodeError)
"""What reading a damaged file raises."""


def write_tensors(path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write a file; one that is already there is replaced in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    # One entry alone: of more, safetensors writes whichever first.
    save_file(tensors, partial, metadata={KEY: json.dumps(meta | {SUM: _checksum(tensors)})})
    partial.replace(path)


def read_tensors(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """The document, None if there is none, and all tensors; raises one of ``UNREADABLE``."""
    with safe_open(path, framework="pt") as f:
        meta = json.loads((f.metadata() or {}).get(KEY, "null"))
        tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    # Files of before have none.
    written = meta.pop(SUM, None) if isinstance(meta, dict) else None
    if written is not None and written != (found := _checksum(tensors)):
        raise OSError(f"its numbers have the checksum {found}, not {written} as when written")
    return meta, tensors


def _checksum(tensors: dict[str, Tensor]) -> int:
    """CRC-32 of all bytes, tensors by name."""
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(tensors[name].contiguous().flatten().view(torch.uint8).cpu().numpy().data, found)
    return found
