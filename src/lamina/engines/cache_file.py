"""A saved cache: one safetensors file, checked when it is read."""

import dataclasses
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lamina import __version__
from lamina.basis.profile import Profile
from lamina.codec import CodecConfig
from lamina.control.config import ControllerConfig
from lamina.control.state import Controller
from lamina.engines import host_layers
from lamina.errors import CacheStateError
from lamina.pages import WindowConfig
from lamina.pages.dump import dump_store, restore_store
from lamina.tensor_file import UNREADABLE, read_tensors, write_tensors

if TYPE_CHECKING:
    from lamina.engines.hf import LaminaCache

FORMAT = "lamina-cache"
FORMAT_VERSION = 2
FIELDS = {
    "model_id": str, "config_hash": str, "profile": str, "dtype": str, "tiers": list, "seen": int, "lengths": list,
    "window": dict, "codec": dict, "hosts": dict, "n_layers": int,
}  # fmt: skip


def save_cache(cache: "LaminaCache", path: Path) -> None:
    """Write a cache; a file that is already there is replaced in one step."""
    if not cache.ours[0].batch_size:
        raise CacheStateError("the cache is empty; there is nothing to save")
    compact: LaminaCache = deepcopy(cache)
    tensors: dict[str, Tensor] = {}
    for layer in compact.ours:
        tensors |= {f"layers.{layer.index}.{name}": t for name, t in dump_store(layer.store).items()}
    hosts = {}
    for i in compact.hosts:
        hosts[str(i)] = host_layers.dump(compact.layers[i])
        tensors |= {f"layers.{i}.host.{name}": t for name, t in host_layers.tensors_of(compact.layers[i]).items()}
    if compact.padding.columns is not None:
        tensors["padding"] = compact.padding.columns
    meta = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "package_version": __version__,
        "model_id": cache.profile.model_id,
        "config_hash": cache.geometry.config_hash,
        "profile": cache.profile.digest(),
        "n_layers": cache.geometry.n_layers,
        "dtype": str(compact.ours[0].store.dtype).removeprefix("torch."),
        "tiers": cache.tiers,
        "seen": cache.seen,
        "lengths": cache.lengths,
        "window": dataclasses.asdict(cache.window),
        "codec": dataclasses.asdict(cache.codec),
        "hosts": hosts,
    }
    write_tensors(path, {n: t.cpu().contiguous() for n, t in tensors.items()}, meta)


def load_cache(
    path: Path,
    model: PreTrainedModel,
    profile: Profile,
    max_bytes: int | None,
    controller: Controller | ControllerConfig | str | None,
) -> "LaminaCache":
    """Read a cache; see :meth:`lamina.engines.hf.LaminaCache.load`."""
    from lamina.engines.hf import LaminaCache

    meta, tensors = read_cache_file(path)
    if meta["profile"] != profile.digest():
        raise CacheStateError(
            f"{path} was written with another profile ({meta['profile']} of {meta['model_id']!r}, this one is "
            f"{profile.digest()} of {profile.model_id!r}); its codes mean nothing in other bases: use that profile"
        )
    try:
        cache = LaminaCache(
            model,
            profile,
            tiers=[tuple(t) for t in meta["tiers"]],
            window=WindowConfig(**meta["window"]),
            codec=CodecConfig(**meta["codec"]),
            max_bytes=max_bytes,
            controller=controller,
        )
        _fill(cache, meta, tensors, model)
    except (KeyError, TypeError, IndexError, RuntimeError, AttributeError) as error:
        if isinstance(error, CacheStateError):
            raise
        raise CacheStateError(f"{path} is damaged ({error}); read the prompt again") from error
    return cache


def _fill(cache: "LaminaCache", meta: dict[str, Any], tensors: dict[str, Tensor], model: PreTrainedModel) -> None:
    dtype = getattr(torch, meta["dtype"])
    devices = layer_devices(model)
    for layer in cache.ours:
        named = _below(f"layers.{layer.index}.", tensors)
        layer.make_store(dtype, devices[layer.index])
        restore_store(layer.store, named, meta["lengths"])
        layer.seen = meta["seen"]
    for i in cache.hosts:
        named = _below(f"layers.{i}.host.", tensors)
        host_layers.restore(cache.layers[i], meta["hosts"][str(i)], named, devices[i])
    columns = tensors.get("padding")
    if columns is not None and columns.shape != (len(meta["lengths"]), meta["seen"]):
        raise CacheStateError(f"the padding has shape {tuple(columns.shape)}; read the prompt again")
    if columns is not None:
        cache.budget.ensure(columns.numel)
    cache.padding.keep(columns)
    if cache.padding.lengths(len(meta["lengths"]), meta["seen"]) != meta["lengths"]:
        raise CacheStateError(f"the padding does not fit lengths {meta['lengths']}; read the prompt again")


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def read_cache_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors of a saved cache.

    Raises
    ------
    CacheStateError
        If the file is missing, unreadable or no saved cache.
    """
    if not path.is_file():
        raise CacheStateError(f"there is no saved cache at {path}")
    try:
        meta, tensors = read_tensors(path)
    except UNREADABLE as error:
        raise CacheStateError(f"{path} cannot be read as a saved cache ({error}); read the prompt again") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise CacheStateError(f"{path} is a safetensors file but no saved cache")
    if meta.get("format_version") != FORMAT_VERSION:
        raise CacheStateError(
            f"{path} has cache format {meta.get('format_version')}, this Lamina reads {FORMAT_VERSION}; "
            "read the prompt again"
        )
    for name, kind in FIELDS.items():
        if not isinstance(meta.get(name), kind):
            raise CacheStateError(f"{path}: field {name} is {meta.get(name)!r}, not {kind.__name__}")
    return meta, tensors


def layer_devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Where each layer computes; layers that accelerate offloads compute on its main device."""
    placed = [d for d in (getattr(model, "hf_device_map", None) or {}).values() if d not in ("cpu", "disk")]
    main = torch.device(placed[0] if placed else "cpu")
    found = {}
    for module in model.modules():
        index, parameter = getattr(module, "layer_idx", None), next(module.parameters(), None)
        if isinstance(index, int) and parameter is not None:
            found[index] = main if parameter.device.type == "meta" else parameter.device
    return found
