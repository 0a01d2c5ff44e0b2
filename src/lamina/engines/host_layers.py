"""Cache layers that stay with transformers: their bytes, their state as tensors, and rows joined to them."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from lamina.errors import CacheStateError

DTYPE, DEVICE = "torch.dtype", "torch.device"


def host_layers(config: Any) -> list[Any]:
    """Transformers' own cache layers for a configuration, one for each layer that has one."""
    return list(DynamicCache(config=config).layers)


def length_of(layer: Any) -> int | None:
    """Tokens that a layer with a window has seen, None for layers that do not count."""
    return layer.get_seq_length() if hasattr(layer, "cumulative_length") and layer.is_initialized else None


def is_recurrent(layer: Any) -> bool:
    """Whether a layer has folded tokens into a state that no roll-back can undo."""
    return any(getattr(layer, "is_recurrent_states_initialized", {}).values())


def tensors_of(layer: Any) -> dict[str, Tensor]:
    """Every tensor of a layer by a dotted name."""
    found = {}
    for name, value in vars(layer).items():
        for key, item in value.items() if isinstance(value, dict) else [("", value)]:
            if isinstance(item, Tensor):
                found[f"{name}.{key}" if isinstance(value, dict) else name] = item
    return found


def n_bytes(layer: Any) -> int:
    """Bytes of a layer's tensors."""
    return sum(t.untyped_storage().nbytes() for t in tensors_of(layer).values())


def dump(layer: Any) -> dict[str, Any]:
    """What is not a tensor, as JSON values; with :func:`tensors_of` this is the whole layer."""
    plain = {}
    for name, value in vars(layer).items():
        items = value if isinstance(value, dict) else {"": value}
        kept = {str(k): _plain(name, layer, x) for k, x in items.items() if not isinstance(x, Tensor)}
        if kept:
            plain[name] = kept if isinstance(value, dict) else kept[""]
    return plain


def restore(layer: Any, plain: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> None:
    """Give a fresh layer the state that :func:`dump` and :func:`tensors_of` took."""
    for name, value in plain.items():
        current = getattr(layer, name, None)
        if isinstance(value, dict) and isinstance(current, dict):
            current.update({int(k): _parsed(x, device) for k, x in value.items()})
        else:
            setattr(layer, name, _parsed(value, device))
    for dotted, tensor in tensors.items():
        name, _, key = dotted.partition(".")
        if key:
            getattr(layer, name)[int(key)] = tensor.to(device)
        else:
            setattr(layer, name, tensor.to(device))


def join(mine: Any, theirs: Any, index: int) -> None:
    """Append another layer's rows to ``mine``; the shorter window is padded on the left."""
    if not getattr(theirs, "is_initialized", True):
        raise CacheStateError(f"layer {index}: the cache to add is empty")
    for dotted, other in tensors_of(theirs).items():
        name, _, key = dotted.partition(".")
        if key:
            states = getattr(mine, name)
            states[int(key)] = torch.cat([states[int(key)], other.to(states[int(key)].device)])
        elif other.dim() == 4:
            own, other = getattr(mine, name), other.to(mine.keys.device)
            size = max(own.shape[2], other.shape[2])
            padded = [torch.nn.functional.pad(x, (0, 0, size - x.shape[2], 0)) for x in (own, other)]
            setattr(mine, name, torch.cat(padded))
    if hasattr(mine, "cumulative_length"):
        mine.cumulative_length = max(mine.cumulative_length, theirs.cumulative_length)


def _plain(name: str, layer: Any, value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {DEVICE: ""}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CacheStateError(f"{type(layer).__name__}.{name} holds a {type(value).__name__}, which cannot be saved")


def _parsed(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict) and DTYPE in value:
        return getattr(torch, value[DTYPE])
    return device if isinstance(value, dict) and DEVICE in value else value
