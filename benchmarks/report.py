"""How every benchmark writes its CSV, and what that says of where it ran."""

import csv
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers


@cache
def environment() -> dict[str, str]:
    """Device, versions and commit."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "device": device,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": git.stdout.strip() or "unknown",
    }


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows with the environment beside each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, [*rows[0], *environment()])
        writer.writeheader()
        writer.writerows(row | environment() for row in rows)
