"""Where figures come from: versions, device and commit."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

from transformers import PreTrainedModel

from lamina import __version__
from lamina.app.demo_report import PACKAGES, device_name


def environment(model: PreTrainedModel) -> dict[str, str | None]:
    """What a record of a measurement says of its circumstances; the commit is None outside a checkout of Lamina."""
    return {
        "lamina": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "device": device_name(model),
        "system": f"{platform.system()} {platform.machine()}",
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def commit(file: Path = Path(__file__)) -> str | None:
    """Short hash of the commit a file is of, with + if tracked files differ; None if git does not know the file."""
    if _git(file, "ls-files", "--error-unmatch", file.name) is None:
        return None
    found = _git(file, "rev-parse", "--short", "HEAD")
    return None if found is None else found + ("+" if _git(file, "diff", "--quiet", "HEAD") is None else "")


def _git(file: Path, *words: str) -> str | None:
    """What git says in the file's folder; None if it fails or is missing."""
    try:
        run = subprocess.run(
            ["git", "-C", str(file.parent), *words], capture_output=True, text=True, check=False, timeout=10
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None
