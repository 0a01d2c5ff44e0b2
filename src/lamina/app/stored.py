"""A file that Lamina wrote, as its header describes it."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class StoredTensor:
    """Shape and safetensors dtype (``F32``, ``BF16``, ``U8``, ...) of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def n_bytes(self) -> int:
        """Bytes in the file."""
        digits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (int(digits[0]) if digits else 8) // 8


@dataclass(frozen=True)
class StoredFile:
    """Where the file is, what its metadata says, and its tensors by name."""

    path: Path
    meta: dict[str, Any]
    tensors: dict[str, StoredTensor]
