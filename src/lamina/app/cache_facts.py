"""What is in a saved cache, from its header alone."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from lamina.app.stored import StoredFile


@dataclass(frozen=True)
class CacheFacts:
    """A saved cache at a glance; a field that the file does not record is None.

    Attributes
    ----------
    model_id, config_hash, package_version : str or None
        What it was filled by, and saved by which Lamina.
    dtype : str or None
        Of the exact rows.
    window : dict or None
        Exact windows.
    lengths : list of int or None
        Tokens of each sequence.
    n_layers : int
        Layers with tensors.
    bytes_by_layer, bytes_by_name : dict
        Bytes of tensors by layer, and by name over all layers.
    """

    model_id: str | None
    config_hash: str | None
    package_version: str | None
    dtype: str | None
    window: Any
    lengths: list[int] | None
    n_layers: int
    bytes_by_layer: dict[str, int]
    bytes_by_name: dict[str, int]


def cache_facts(stored: StoredFile) -> CacheFacts:
    """Read the metadata, and add up the tensors named ``layers.<i>.<name>``."""
    by_layer: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    for name, tensor in stored.tensors.items():
        prefix, _, rest = name.partition(".")
        layer, _, kind = rest.partition(".")
        if prefix == "layers" and layer.isdecimal() and kind:
            by_layer[layer] += tensor.n_bytes
            by_name[kind] += tensor.n_bytes
        else:
            by_name[name] += tensor.n_bytes
    fields = ("model_id", "config_hash", "package_version", "dtype", "window", "lengths")
    return CacheFacts(
        **{field: stored.meta.get(field) for field in fields},
        n_layers=len(by_layer),
        bytes_by_layer={layer: by_layer[layer] for layer in sorted(by_layer, key=int)},
        bytes_by_name=dict(by_name),
    )
