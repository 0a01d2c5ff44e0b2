"""Files that a command writes at its end."""

import os
from pathlib import Path

from lamina.errors import ConfigError


def check_output(path: Path, option: str, example: str) -> None:
    """Find out before the work, not after it, that a file cannot be written; its folder is made.

    Raises
    ------
    ConfigError
        Naming ``option``, and ``example`` as a file's name where the path is a folder.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}. Choose another file with {option}.") from error
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file, such as {path / example}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: permission denied. Choose another file with {option}.")
