"""What is in a profile: where it comes from, and how hard each layer is to store."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lamina.app.stored import StoredFile
from lamina.app.values import tier_name
from lamina.basis.moments import Moments
from lamina.basis.profile import LayerProfile, Profile


@dataclass(frozen=True)
class LayerFacts:
    """Figures of one layer; those marked "worst" are the largest over its KV heads, the others are means.

    Attributes
    ----------
    layer, n_heads, head_dim : int
        Index, KV heads and head dimension.
    condition : float
        Condition number of the key basis, worst.
    key_spread : float or None
        Largest over smallest eigenvalue of the key moment, worst; None without moments.
    kappa : float
        Mean squared error of 2-bit keys in units of their squared step.
    q_energy, v_energy : float
        Mean squared norm of queries and values in the packed basis.
    value_offset : float or None
        Norm of the mean value, in units of the values' root mean square norm, worst; None without moments.
    output_kl_k2, output_kl_v2 : float or None
        KL of the model's output that its K or V at 2 bits costs, in nats; None in a profile that is not tuned.
    """

    layer: int
    n_heads: int
    head_dim: int
    condition: float
    key_spread: float | None
    kappa: float
    q_energy: float
    v_energy: float
    value_offset: float | None
    output_kl_k2: float | None = None
    output_kl_v2: float | None = None


@dataclass(frozen=True)
class ProfileFacts:
    """A profile at a glance.

    Attributes
    ----------
    model_id, config_hash, package_version : str
        What it was made from, and by which Lamina.
    transform : str
        Basis.
    tiers : list of str
        Initial tier, one a layer.
    absorbed, has_moments : bool
        Whether V's basis is in the model's weights, and whether other bases can be derived.
    n_layers : int
        Layers of the model.
    tokens, max_position : int or None
        Tokens calibrated on, and the largest position covered; None in a profile of imported rotations.
    random_positions : bool or None
        Whether sequences were moved over that range.
    layers : list of LayerFacts
        The layers that are packed.
    tuning : dict or None
        The controller's settings, and what tuning measured.
    """

    model_id: str
    config_hash: str
    package_version: str
    transform: str
    tiers: list[str]
    absorbed: bool
    has_moments: bool
    n_layers: int
    tokens: int | None
    max_position: int | None
    random_positions: bool | None
    layers: list[LayerFacts]
    tuning: dict[str, Any] | None = None


def profile_facts(stored: StoredFile) -> ProfileFacts:
    """Load and check a profile, and take its figures."""
    profile = Profile.load(stored.path)
    packed, tuning = profile.packed, profile.tuning
    layers = [layer_facts(i, layer) for i, layer in packed.items()]
    if tuning is not None:
        costs = zip(tuning.drift[::2], tuning.drift[1::2])
        layers = [replace(one, output_kl_k2=k[0], output_kl_v2=v[0]) for one, (k, v) in zip(layers, costs)]
    return ProfileFacts(
        model_id=profile.model_id,
        config_hash=profile.config_hash,
        package_version=str(stored.meta.get("package_version", "unknown")),
        transform=profile.transform,
        tiers=[tier_name(tier) for tier in profile.tiers],
        absorbed=profile.absorbed,
        has_moments=any(layer.moments is not None for layer in packed.values()),
        n_layers=len(profile.layers),
        tokens=profile.info.get("tokens"),
        max_position=profile.info.get("max_position"),
        random_positions=profile.info.get("random_positions"),
        layers=layers,
        tuning=None if tuning is None else {"settings": tuning.settings, "measured": tuning.measured},
    )


def layer_facts(index: int, layer: LayerProfile) -> LayerFacts:
    """Figures of one layer."""
    n_heads, head_dim, _ = layer.transform.k_forward.shape
    moments = layer.moments
    return LayerFacts(
        layer=index,
        n_heads=n_heads,
        head_dim=head_dim,
        condition=float(torch.linalg.cond(layer.transform.k_forward.double()).max()),
        key_spread=None if moments is None else spread(moments.c_k),
        kappa=float(layer.kappa[:, 0, 0].mean()),
        q_energy=float(layer.q_energy.mean()),
        v_energy=float(layer.v_energy.mean()),
        value_offset=None if moments is None else value_offset(moments),
    )


def spread(moment: Tensor) -> float:
    """Largest over smallest eigenvalue of ``[H, D, D]``, worst head; profiles keep float32, so 8e6 is the most."""
    values = torch.linalg.eigvalsh(moment.double())
    largest = values[:, -1].clamp(min=torch.finfo(torch.float64).tiny)
    smallest = torch.maximum(values[:, 0], largest * torch.finfo(torch.float32).eps)
    return float((largest / smallest).max())


def value_offset(moments: Moments) -> float:
    """|E v| over the root of E |v|^2, worst head: 0 for values around zero, 1 for constant ones."""
    offset = moments.mean_v.square().sum(-1)
    whole = offset + moments.c_v.diagonal(dim1=-2, dim2=-1).sum(-1)
    return float((offset / whole.clamp(min=torch.finfo(torch.float64).tiny)).sqrt().max())
