"""Values as JSON can hold them."""

import math
from typing import Any


def finite(value: Any) -> Any:
    """The value with None for every number that is not finite, at any depth; tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
