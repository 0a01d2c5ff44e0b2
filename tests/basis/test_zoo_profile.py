"""RotationZoo files become profiles, and back."""

import dataclasses

import pytest
import torch

from lamina.basis.geometry import LayerGeometry, LayerKind, ModelGeometry
from lamina.basis.profile import Profile
from lamina.basis.rotation_zoo import save_rotation_zoo
from lamina.basis.zoo_profile import export_rotation_zoo, import_rotation_zoo
from lamina.errors import ConfigError, ProfileError, UnsupportedModelError

LAYERS, HEADS, DIM = 2, 3, 32


@pytest.fixture
def geometry() -> ModelGeometry:
    return ModelGeometry((LayerGeometry(LayerKind.FULL, HEADS, DIM),) * LAYERS, 6, 4096, 0.0, "0123456789abcdef")


def rotations(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(LAYERS, HEADS, DIM, DIM, generator=generator))[0]


def test_import_keeps_logits_and_values(tmp_path, geometry):
    k, v = rotations(0), rotations(1)
    for path, rotation, kind in (("k.pt", k, "k"), ("v.pt", v, "v")):
        save_rotation_zoo(tmp_path / path, rotation.bfloat16().float(), kind=kind, per_head=True)
    profile = import_rotation_zoo(tmp_path / "k.pt", tmp_path / "v.pt", geometry, "m")
    profile.save(tmp_path / "p")
    profile = Profile.load(tmp_path / "p")
    profile.check_model(geometry)
    eye = torch.eye(DIM)
    for i, layer in enumerate(profile.layers):
        t = layer.transform
        assert torch.allclose(t.k_forward @ t.q_forward.mT, eye.expand(HEADS, -1, -1), atol=1e-5)
        assert torch.allclose(t.v_forward @ t.v_forward.mT, eye.expand(HEADS, -1, -1), atol=1e-5)
        assert torch.allclose(t.k_forward, k[i], atol=4e-3)
        assert torch.allclose(t.v_forward, v[i], atol=8e-3)


def test_round_trip(tmp_path, geometry):
    for path, seed, kind in (("k.pt", 0, "k"), ("v.pt", 1, "v")):
        save_rotation_zoo(tmp_path / path, rotations(seed), kind=kind, per_head=True)
    profile = import_rotation_zoo(tmp_path / "k.pt", tmp_path / "v.pt", geometry, "m")
    export_rotation_zoo(profile, tmp_path / "k2.pt", tmp_path / "v2.pt")
    again = import_rotation_zoo(tmp_path / "k2.pt", tmp_path / "v2.pt", geometry, "m")
    for a, b in zip(profile.layers, again.layers):
        assert torch.allclose(a.transform.k_forward, b.transform.k_forward, atol=1e-6)
        assert torch.allclose(a.transform.v_forward, b.transform.v_forward, atol=1e-5)


def test_refusals(tmp_path, geometry):
    save_rotation_zoo(tmp_path / "k.pt", rotations(0), kind="k", per_head=True)
    with pytest.raises(ProfileError, match="layers"):
        import_rotation_zoo(
            tmp_path / "k.pt", tmp_path / "k.pt", dataclasses.replace(geometry, layers=geometry.layers * 2), "m"
        )
    mixed = dataclasses.replace(
        geometry, layers=(LayerGeometry(LayerKind.WINDOW, HEADS, DIM, 64), *geometry.layers[1:])
    )
    with pytest.raises(UnsupportedModelError, match="this model's layers differ"):
        import_rotation_zoo(tmp_path / "k.pt", tmp_path / "k.pt", mixed, "m")
    profile = import_rotation_zoo(tmp_path / "k.pt", tmp_path / "k.pt", geometry, "m")
    partly = dataclasses.replace(profile, layers=[None, *profile.layers[1:]])
    with pytest.raises(ProfileError, match="this profile's layers differ"):
        export_rotation_zoo(partly, tmp_path / "a", tmp_path / "b")
    with pytest.raises(ProfileError, match="with_transform"):
        export_rotation_zoo(dataclasses.replace(profile, transform="balanced"), tmp_path / "a", tmp_path / "b")
    with pytest.raises(ConfigError, match="needs calibration moments"):
        profile.with_transform("balanced")
