"""How a worker's figures reach the process that serves metrics: a small file that is replaced in one step."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def stats_path(vllm_config: Any) -> Path:
    """The file of an engine, of which all its processes know the name."""
    return Path(tempfile.gettempdir()) / f"lamina-{vllm_config.instance_id}.json"


def replace_json(path: Path, document: dict[str, Any]) -> None:
    """Write a file; one that is already there is replaced in one step."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(document), encoding="utf-8")
    temporary.replace(path)


def read_stats(path: Path) -> dict[str, Any] | None:
    """The latest figures, None before the first."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
