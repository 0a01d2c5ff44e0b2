"""The files Lamina keeps: safetensors with a JSON document in the header."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

KEY = "lamina"
UNREADABLE = (SafetensorError, OSError, json.JSONDecodeError)
"""What reading a damaged file raises."""


def write_tensors(path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write a file; one that is already there is replaced in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, metadata={KEY: json.dumps(meta)})
    partial.replace(path)


def read_tensors(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """The document, None if there is none, and all tensors; raises one of ``UNREADABLE``."""
    with safe_open(path, framework="pt") as f:
        meta = json.loads((f.metadata() or {}).get(KEY, "null"))
        return meta, {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
