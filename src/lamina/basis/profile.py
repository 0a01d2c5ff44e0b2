"""The profile: everything calibration learnt about one model, in one safetensors file."""

import dataclasses
import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lamina import __version__
from lamina.basis.geometry import ModelGeometry
from lamina.basis.moments import Moments
from lamina.basis.transforms import LayerTransform, StoredBasis, check_condition, make_transform
from lamina.basis.tuning import Tuning
from lamina.errors import ProfileError
from lamina.tensor_file import UNREADABLE, read_tensors, write_tensors

FORMAT = "lamina-profile"
FORMAT_VERSION = 2
META_FIELDS = {
    "model_id": str,
    "config_hash": str,
    "layers": list,
    "transform": str,
    "tiers": list,
    "absorbed": bool,
    "info": dict,
}


@dataclass
class LayerProfile:
    """What calibration learnt about one layer; H counts KV heads. All tensors are float32 on the CPU.

    Attributes
    ----------
    transform : LayerTransform
        The bases.
    kappa : Tensor
        ``[H, 3, 3]``: mean squared error of K codes in units of their squared step, by tier (2, 4, 8) and by bits
        read (2, 4, 8).
    q_energy, v_energy : Tensor
        ``[H]``: E|q'|^2 and E|v'|^2 in the packed basis.
    moments : Moments or None
        The statistics, kept so that another transform can be derived.
    """

    transform: LayerTransform
    kappa: Tensor
    q_energy: Tensor
    v_energy: Tensor
    moments: Moments | None = None

    @cached_property
    def stored(self) -> StoredBasis:
        """The bases that pages are stored in, which all caches of this profile share."""
        return self.transform.stored()

    @property
    def n_kv_heads(self) -> int:
        """KV heads."""
        return self.transform.k_forward.shape[0]

    @property
    def head_dim(self) -> int:
        """Head dimension."""
        return self.transform.k_forward.shape[-1]

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor, as stored."""
        named = {f.name: getattr(self.transform, f.name) for f in dataclasses.fields(self.transform)}
        named |= {"kappa": self.kappa, "q_energy": self.q_energy, "v_energy": self.v_energy}
        if self.moments is not None:
            named |= {f"moments.{n}": getattr(self.moments, n) for n in self.moments.names()}
        return {name: t.to(torch.float32).contiguous() for name, t in named.items()}

    @classmethod
    def from_tensors(cls, named: dict[str, Tensor]) -> "LayerProfile":
        """Inverse of :meth:`tensors`; KeyError names a missing tensor."""
        transform = LayerTransform(**{f.name: named[f.name] for f in dataclasses.fields(LayerTransform)})
        moments = None
        if any(n.startswith("moments.") for n in named):
            moments = Moments(**{f.name: named[f"moments.{f.name}"].double() for f in dataclasses.fields(Moments)})
        return cls(transform, named["kappa"], named["q_energy"], named["v_energy"], moments)


@dataclass
class Profile:
    """A calibrated profile of one model.

    Attributes
    ----------
    layers : list of LayerProfile or None
        One a layer of the model; None where transformers keeps the cache.
    model_id, config_hash : str
        The model it was made from.
    transform : str
        Name of the transform.
    tiers : list of (int, int)
        Initial bits of K and V, one pair a layer of the model.
    absorbed : bool
        Whether V's basis was folded into the model's weights, see :func:`lamina.basis.absorb.absorb_value_basis`.
    info : dict
        Tokens, data digest, positions, package version.
    tuning : Tuning or None
        What ``lamina tune`` added.

    Examples
    --------
    >>> from lamina import Profile
    >>> profile = Profile.load("model.profile")
    >>> profile.transform, profile.tiers[0]
    ('balanced', (2, 2))
    >>> profile.with_transform("hadamard").save("hadamard.profile")
    """

    layers: list[LayerProfile | None]
    model_id: str
    config_hash: str
    transform: str
    tiers: list[tuple[int, int]]
    absorbed: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    tuning: Tuning | None = None

    @property
    def packed(self) -> dict[int, LayerProfile]:
        """The layers that Lamina keeps, by index."""
        return {i: layer for i, layer in enumerate(self.layers) if layer is not None}

    def digest(self) -> str:
        """First 16 hex digits of a SHA-256 over the bases and what else packed rows are read with."""
        found = hashlib.sha256()
        for i, layer in self.packed.items():
            for name, tensor in layer.tensors().items():
                if not name.startswith("moments."):
                    found.update(f"{i} {name} ".encode() + tensor.numpy().tobytes())
        return found.hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write the profile; a file that is already there is replaced in one step."""
        path = Path(path)
        meta = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "package_version": __version__,
            "model_id": self.model_id,
            "config_hash": self.config_hash,
            "layers": [None if x is None else [x.n_kv_heads, x.head_dim] for x in self.layers],
            "transform": self.transform,
            "tiers": self.tiers,
            "absorbed": self.absorbed,
            "info": self.info,
            "tuning": None if self.tuning is None else self.tuning.as_json(),
        }
        tensors = {f"layers.{i}.{n}": t for i, layer in self.packed.items() for n, t in layer.tensors().items()}
        write_tensors(path, tensors, meta)

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Read and check a profile.

        Raises
        ------
        ProfileError
            If the file is missing, unreadable or no profile; if a layer or tensor is missing, has a wrong shape, or
            holds NaN or Inf; if a key basis is singular.
        """
        meta, tensors = _read(Path(path))
        shapes = meta["layers"]
        n_layers = len(shapes)
        if len(meta["tiers"]) != n_layers or any(not isinstance(t, list) or len(t) != 2 for t in meta["tiers"]):
            raise ProfileError(f"{path}: tiers {meta['tiers']!r} are not {n_layers} pairs of bits; calibrate again")
        layers: list[LayerProfile | None] = []
        for i, shape in enumerate(shapes):
            if shape is None:
                layers.append(None)
                continue
            if not isinstance(shape, list) or len(shape) != 2 or not all(isinstance(n, int) for n in shape):
                raise ProfileError(f"{path}: layer {i} has geometry {shape!r}, not KV heads and head dimension")
            prefix = f"layers.{i}."
            named = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            if not named:
                raise ProfileError(f"{path}: layer {i} of {n_layers} is missing; calibrate again")
            _check_layer(f"{path}: layer {i}", named, *shape)
            layer = LayerProfile.from_tensors(named)
            try:
                layer.stored  # noqa: B018 - computed now, so that a basis that cannot be stored is told here
            except ProfileError as e:
                raise ProfileError(f"{path}: layer {i}: {e}") from None
            layers.append(layer)
        return cls(
            layers,
            meta["model_id"],
            meta["config_hash"],
            meta["transform"],
            [tuple(t) for t in meta["tiers"]],
            meta["absorbed"],
            meta["info"],
            _tuning(path, meta.get("tuning"), sum(shape is not None for shape in shapes)),
        )

    def check_model(self, geometry: ModelGeometry) -> None:
        """Raise ProfileError unless the profile belongs to a model of this geometry."""
        checks: list[tuple[str, Any, Any]] = [("layers", len(self.layers), geometry.n_layers)]
        checks.append(("full-attention layers", list(self.packed), list(geometry.packed)))
        for i, layer in geometry.packed.items():
            mine = self.packed.get(i)
            if mine is not None:
                checks.append((f"layer {i}: KV heads", mine.n_kv_heads, layer.n_kv_heads))
                checks.append((f"layer {i}: head dimension", mine.head_dim, layer.head_dim))
        checks.append(("configuration hash", self.config_hash, geometry.config_hash))
        for what, ours, theirs in checks:
            if ours != theirs:
                raise ProfileError(
                    f"the profile of {self.model_id!r} does not fit this model: {what} {ours} against {theirs}; "
                    "calibrate a profile for this model"
                )

    def with_transform(self, name: str, **options: Any) -> "Profile":
        """Derive the profile of another transform; needs moments except for ``identity`` and ``hadamard``.

        ``options`` are those of :func:`lamina.basis.transforms.make_transform`. The derived profile has kappa 0.
        """
        if self.absorbed:
            raise ProfileError("the profile's value basis was folded into the model; derive from the original profile")
        layers: list[LayerProfile | None] = [None] * len(self.layers)
        for i, layer in self.packed.items():
            transform = make_transform(
                name, layer.moments, n_heads=layer.n_kv_heads, head_dim=layer.head_dim, **options
            )
            layers[i] = derive_layer(transform, layer)
        return dataclasses.replace(self, layers=layers, transform=str(name), tuning=None)


def derive_layer(transform: LayerTransform, layer: LayerProfile) -> LayerProfile:
    """Layer with another transform, energies recomputed from the moments where it has them, kappa 0."""
    q_energy, v_energy = layer.q_energy, layer.v_energy
    if layer.moments is not None:
        q_energy, v_energy = energies(transform, layer.moments)
    return LayerProfile(transform.float(), torch.zeros_like(layer.kappa), q_energy, v_energy, layer.moments)


def energies(transform: LayerTransform, moments: Moments) -> tuple[Tensor, Tensor]:
    """E|q'|^2 and E|v'|^2, float32 ``[H]``."""
    t = transform.q_forward.double()
    q_energy = torch.einsum("hij,hjk,hik->h", t.mT, moments.c_q, t.mT)
    offset = moments.mean_v - transform.mean_v.double()
    v_energy = moments.c_v.diagonal(dim1=-2, dim2=-1).sum(-1) + offset.square().sum(-1)
    return q_energy.float(), v_energy.float()


def _tuning(path: str | Path, found: Any, n_layers: int) -> Tuning | None:
    try:
        return None if found is None else Tuning.from_json(found, n_layers)
    except ValueError as error:
        raise ProfileError(f"{path}: what tuning left is damaged ({error}); tune again") from error


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise ProfileError(f"there is no profile at {path}; make one with `lamina calibrate MODEL -o {path}`")
    try:
        meta, tensors = read_tensors(path)
    except UNREADABLE as e:
        raise ProfileError(f"{path} cannot be read as a profile ({e}); calibrate again") from e
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ProfileError(f"{path} is a safetensors file but no Lamina profile")
    if meta.get("format_version") != FORMAT_VERSION:
        raise ProfileError(
            f"{path} has profile format {meta.get('format_version')}, this Lamina reads {FORMAT_VERSION}; "
            "calibrate again"
        )
    for name, kind in META_FIELDS.items():
        if not isinstance(meta.get(name), kind):
            raise ProfileError(f"{path}: field {name} is {meta.get(name)!r}, not {kind.__name__}; calibrate again")
    return meta, tensors


def _check_layer(where: str, named: dict[str, Tensor], n_heads: int, dim: int) -> None:
    matrix = (n_heads, dim, dim)
    shapes: dict[str, tuple[int, ...]] = {
        "k_forward": matrix,
        "q_forward": matrix,
        "v_forward": matrix,
        "mean_v": (n_heads, dim),
        "kappa": (n_heads, 3, 3),
        "q_energy": (n_heads,),
        "v_energy": (n_heads,),
    }
    if any(name.startswith("moments.") for name in named):
        moments = {f"moments.{f.name}": matrix for f in dataclasses.fields(Moments)}
        shapes |= moments | {"moments.mean_v": (n_heads, dim)}
    for name, shape in shapes.items():
        if name not in named:
            raise ProfileError(f"{where} lacks {name}; calibrate again")
        if tuple(named[name].shape) != shape:
            raise ProfileError(
                f"{where}: {name} has shape {tuple(named[name].shape)}, expected {shape} "
                f"({n_heads} KV heads, head dimension {dim}); calibrate again"
            )
    for name, t in named.items():
        if not bool(torch.isfinite(t).all()):
            raise ProfileError(f"{where}: {name} holds NaN or Inf; calibrate again")
    try:
        check_condition(named["k_forward"])
    except ProfileError as e:
        raise ProfileError(f"{where}: {e}") from None
    product = named["k_forward"].double() @ named["q_forward"].double().mT
    error = float((product - torch.eye(dim, dtype=torch.float64)).abs().max())
    if error > 1e-2:
        raise ProfileError(f"{where}: k_forward and q_forward are not inverse to each other (off by {error:.2g})")
    r = named["v_forward"].double()
    error = float((r @ r.mT - torch.eye(dim, dtype=torch.float64)).abs().max())
    if error > 1e-2:
        raise ProfileError(f"{where}: v_forward is not orthogonal (off by {error:.2g}); calibrate again")
