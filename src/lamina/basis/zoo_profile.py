"""Profiles from, and to, OSCAR's rotation files."""

from pathlib import Path

import torch

from lamina.basis.geometry import LayerKind, ModelGeometry
from lamina.basis.profile import LayerProfile, Profile
from lamina.basis.rotation_zoo import load_rotation_zoo, save_rotation_zoo
from lamina.basis.transforms import LayerTransform, TransformName
from lamina.errors import ProfileError, UnsupportedModelError


def import_rotation_zoo(k_path: str | Path, v_path: str | Path, geometry: ModelGeometry, model_id: str) -> Profile:
    """Make a profile of a pair of RotationZoo files.

    It holds rotations only: no moments, so no other transform can be derived; no measured noise, so attention makes no
    mass correction; and unit energies, so planes are shed by their mean squared error alone.

    Parameters
    ----------
    k_path, v_path : path
        Rotation files of keys and of values, format version 1 or 2.
    geometry : ModelGeometry
        Of the model they belong to.
    model_id : str
        Recorded in the profile.

    Raises
    ------
    ProfileError
        If a file is unreadable or does not fit the model.
    UnsupportedModelError
        If the model's layers differ in size or kind.
    """
    first = geometry.layers[0]
    if set(geometry.layers) != {first} or first.kind != LayerKind.FULL:
        raise UnsupportedModelError(
            "a rotation file has one matrix of one size for every layer, but this model's layers differ; calibrate it"
        )
    heads, dim = first.n_kv_heads, first.head_dim
    shape = {"n_layers": geometry.n_layers, "n_kv_heads": heads, "head_dim": dim}
    k, v = load_rotation_zoo(k_path, **shape), load_rotation_zoo(v_path, **shape)
    layers: list[LayerProfile | None] = []
    for i, (k_layer, v_layer) in enumerate(zip(k, v)):
        # Files are rounded to 16 bits at times: the exact inverse keeps q'.k' = q.k.
        q_forward = torch.linalg.inv(k_layer.double()).mT.float()
        u, _, w = torch.linalg.svd(v_layer.double())
        transform = LayerTransform(k_layer, q_forward, (u @ w).float(), torch.zeros(heads, dim))
        if not bool(torch.isfinite(q_forward).all()):
            raise ProfileError(f"{k_path}: the rotation of layer {i} is singular")
        layers.append(LayerProfile(transform, torch.zeros(heads, 3, 3), torch.ones(heads), torch.ones(heads)))
    return Profile(
        layers=layers,
        model_id=model_id,
        config_hash=geometry.config_hash,
        transform=str(TransformName.OSCAR),
        tiers=[(2, 2)] * geometry.n_layers,
        info={"imported_from": [Path(k_path).name, Path(v_path).name]},
    )


def export_rotation_zoo(profile: Profile, k_path: str | Path, v_path: str | Path, *, per_head: bool = True) -> None:
    """Write an orthogonal profile (``oscar`` or ``hadamard``) as a pair of RotationZoo files.

    Raises
    ------
    ProfileError
        If the profile's key basis is not orthogonal, or values are stored about their mean, which the format cannot
        express.
    """
    transforms = [layer.transform for layer in profile.packed.values()]
    if len(transforms) < len(profile.layers) or len({t.k_forward.shape for t in transforms}) > 1:
        raise ProfileError("a rotation file has one matrix of one size for every layer; this profile's layers differ")
    if profile.transform == TransformName.BALANCED or any(bool(t.mean_v.any()) for t in transforms):
        raise ProfileError(
            f"a {profile.transform!r} profile cannot be written as rotations: the format knows neither stretched keys "
            "nor value means; derive an orthogonal one with profile.with_transform('oscar')"
        )
    k, v = (torch.stack([getattr(t, name) for t in transforms]) for name in ("k_forward", "v_forward"))
    save_rotation_zoo(k_path, k, kind="k", per_head=per_head)
    save_rotation_zoo(v_path, v, kind="v", per_head=per_head)
