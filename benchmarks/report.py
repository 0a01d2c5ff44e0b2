"""What every benchmark's CSV says of where it ran."""

import platform
import subprocess
from functools import cache

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
