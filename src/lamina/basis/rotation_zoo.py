"""Import and export of OSCAR's RotationZoo files (`k_rotation_*.pt`, `v_rotation_*.pt`).

A file is a `torch.save`d dict with `format_version`, `objective`, `source_grouping` and `layers`; `layers` maps a layer
index (int or str) to an entry whose `rotation` is the matrix. Format version 1 (and "identity-v1", which their identity
baseline writes) has one matrix [D, D] a layer; version 2 has one a layer and KV head, [n_kv_heads, D, D].

Convention: rows are row vectors and the matrix stands on the right. Packed rows are `rows @ R`; queries read packed
keys as `q @ R`, and an attention output over packed values is turned back by `o @ R.T`.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
from torch import Tensor

from lamina.errors import ConfigError, ProfileError

ORTHOGONALITY_TOLERANCE = 1e-2
"""Largest accepted entry of |R R' - I|: rotations rounded to bf16 stay below half of it."""

_HAS_HEAD_AXIS: dict[int | str, bool] = {1: False, "identity-v1": False, 2: True}


def load_rotation_zoo(path: str | os.PathLike[str], *, n_layers: int, n_kv_heads: int, head_dim: int) -> Tensor:
    """Read one RotationZoo file; whether it is for K or for V is not recorded in it.

    Parameters
    ----------
    path
        The `.pt` file. It is read with `weights_only=True`: no code in it can run.
    n_layers, n_kv_heads, head_dim
        Geometry of the model that the rotations are meant for. The file must hold layers 0 .. n_layers - 1, no others.

    Returns
    -------
    Tensor
        float32 [n_layers, n_kv_heads, head_dim, head_dim] on the CPU, values as stored; packed rows are `rows @ R`.
        A matrix shared by a layer (version 1) is repeated for every head.

    Raises
    ------
    ProfileError
        If the file is unreadable, is no RotationZoo file or of an unknown version, has missing or surplus layers, the
        wrong head count or head dim, NaN or Inf, or a matrix further than 1e-2 from orthogonal.
    """
    name = f"RotationZoo file {os.fspath(path)!r}"
    has_head_axis, layers = _parse(_read(path, name), name)

    wanted = [str(layer) for layer in range(n_layers)]
    if missing := [layer for layer in wanted if layer not in layers]:
        raise ProfileError(f"{name} lacks layers {', '.join(missing)} of {n_layers}; export it again for this model")
    if surplus := [layer for layer in layers if layer not in wanted]:
        raise ProfileError(
            f"{name} has layers {', '.join(surplus)}, but the model has only {n_layers}: it belongs to another model"
        )

    rotations = []
    for layer in wanted:
        rotation, where = layers[layer], f"{name}, layer {layer}"
        _check_shape(rotation, where, has_head_axis=has_head_axis, n_kv_heads=n_kv_heads, head_dim=head_dim)
        rotation_hdd = rotation.detach().to(torch.float32).reshape(-1, head_dim, head_dim)
        if not rotation_hdd.isfinite().all():
            raise ProfileError(f"{where}: the rotation holds NaN or Inf; calibrate it again")
        if (error := _orthogonality_error(rotation_hdd)) > ORTHOGONALITY_TOLERANCE:
            raise ProfileError(
                f"{where}: the matrix is not orthogonal (|R R' - I| reaches {error:.2g}, at most "
                f"{ORTHOGONALITY_TOLERANCE:g} is accepted); use a file of rotations"
            )
        rotations.append(rotation_hdd.expand(n_kv_heads, -1, -1))
    return torch.stack(rotations)


def save_rotation_zoo(
    path: str | os.PathLike[str], rotations: Tensor, *, kind: Literal["k", "v"], per_head: bool
) -> None:
    """Write rotations as a RotationZoo file that OSCAR's loader reads.

    Parameters
    ----------
    path
        File to write; OSCAR names them `k_rotation_<objective>.pt` and `v_rotation_<objective>.pt`.
    rotations
        [n_layers, n_kv_heads, D, D], any floating dtype (stored as float32), packed rows being `rows @ R`.
    kind
        "k" or "v", recorded in the file's `objective`.
    per_head
        True writes format version 2, one matrix a layer and head. False writes version 1, one a layer.

    Raises
    ------
    ConfigError
        If `kind` is unknown, the shape is wrong, a matrix is not finite or not orthogonal (the `balanced` key basis is
        not: the format cannot hold it), or `per_head=False` although the heads of a layer differ.
    """
    if kind not in ("k", "v"):
        raise ConfigError(f"kind is {kind!r}; use 'k' or 'v'")
    if rotations.dim() != 4 or rotations.shape[-1] != rotations.shape[-2] or 0 in rotations.shape:
        raise ConfigError(f"rotations have shape {tuple(rotations.shape)}; pass [n_layers, n_kv_heads, D, D]")
    rotations = rotations.detach().to("cpu", torch.float32)
    for layer, rotation_hdd in enumerate(rotations):
        error = _orthogonality_error(rotation_hdd)
        if not error <= ORTHOGONALITY_TOLERANCE:
            raise ConfigError(
                f"layer {layer}: |R R' - I| reaches {error:.2g}; RotationZoo files hold orthogonal matrices only, so "
                "export the 'hadamard' or 'oscar' transform"
            )
        if not per_head and not torch.equal(rotation_hdd, rotation_hdd[:1].expand_as(rotation_hdd)):
            raise ConfigError(f"layer {layer}: the heads have different rotations; use per_head=True")
    state = {
        "format_version": 2 if per_head else 1,
        "objective": f"lamina_{kind}",
        "source_grouping": "per_kv_head" if per_head else "layer",
        "layers": {
            layer: {"layer_id": layer, "rotation": (rotation_hdd if per_head else rotation_hdd[0]).clone()}
            for layer, rotation_hdd in enumerate(rotations)
        },
    }
    torch.save(state, path)


def _read(path: str | os.PathLike[str], name: str) -> Any:
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged file can fail anywhere inside the unpickler
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ProfileError(f"{name} cannot be read ({reason}); check the path or download it again") from error


def _parse(state: Any, name: str) -> tuple[bool, dict[str, Tensor]]:
    """Whether the rotations have a head axis, and the rotation of each layer by the layer's index as text."""
    if not isinstance(state, dict) or "format_version" not in state or not isinstance(state.get("layers"), dict):
        raise ProfileError(f"{name} is no RotationZoo file: it needs the keys 'format_version' and 'layers'")
    version = state["format_version"]
    has_head_axis = _HAS_HEAD_AXIS.get(version) if isinstance(version, int | str) else None
    if has_head_axis is None:
        known = ", ".join(map(repr, _HAS_HEAD_AXIS))
        raise ProfileError(f"{name} has the unknown format_version {version!r}; Lamina reads {known}")
    layers = {}
    for layer, entry in state["layers"].items():
        rotation = entry.get("rotation") if isinstance(entry, dict) else None
        if not isinstance(rotation, Tensor) or not rotation.is_floating_point():
            raise ProfileError(f"{name} is no RotationZoo file: layer {layer} has no floating-point 'rotation'")
        layers[str(layer)] = rotation
    return has_head_axis, layers


def _check_shape(rotation: Tensor, where: str, *, has_head_axis: bool, n_kv_heads: int, head_dim: int) -> None:
    shape = tuple(rotation.shape)
    if len(shape) != 2 + has_head_axis:
        expected = "[n_kv_heads, D, D]" if has_head_axis else "[D, D]"
        raise ProfileError(f"{where}: the rotation has shape {shape}, but its format_version stands for {expected}")
    if shape[-2:] != (head_dim, head_dim):
        raise ProfileError(f"{where}: the rotation has shape {shape}, but the model's head dim is {head_dim}")
    if has_head_axis and shape[0] != n_kv_heads:
        raise ProfileError(f"{where}: rotations for {shape[0]} KV heads, but the model has {n_kv_heads}")


def _orthogonality_error(rotation_hdd: Tensor) -> float:
    """Largest entry of |R R' - I| over the heads; NaN if the matrices hold one."""
    rotation_hdd = rotation_hdd.to(torch.float64)
    gram = rotation_hdd @ rotation_hdd.mT
    return float((gram - torch.eye(gram.shape[-1], dtype=gram.dtype)).abs().max())
