"""The profile file: what is saved is what is loaded, and every kind of damage has its own error."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from helpers import layer_profile
from lamina.basis.geometry import model_geometry
from lamina.basis.profile import Profile, derive_layer, energies
from lamina.basis.transforms import make_transform
from lamina.engines.hf import LaminaCache
from lamina.errors import ConfigError, LaminaError, ProfileError
from tiny_models import build, config, profile_of

Tensors = dict[str, Tensor]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "model.lamina"


def read(path: Path) -> tuple[dict[str, Any], Tensors]:
    with safe_open(path, framework="pt") as f:
        meta = json.loads(f.metadata()["lamina"])
        meta.pop("crc32")
        return meta, {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_a_profile_survives_saving(kind: str, path: Path) -> None:
    profile = profile_of(kind)
    profile.save(path)
    loaded = Profile.load(path)
    for f in dataclasses.fields(Profile):
        if f.name != "layers":
            assert getattr(loaded, f.name) == getattr(profile, f.name), f.name
    for ours, theirs in zip(loaded.layers, profile.layers, strict=True):
        assert ours.moments is not None and theirs.moments is not None
        for name, tensor in theirs.tensors().items():
            assert torch.equal(ours.tensors()[name], tensor), name
        assert ours.moments.c_k.dtype == torch.float64
    assert [f.name for f in path.parent.iterdir()] == [path.name], "no partial file is left"


def test_a_loaded_profile_runs_the_same(path: Path) -> None:
    profile = profile_of("Llama")
    profile.save(path)
    for p in (profile, Profile.load(path)):
        p.check_model(model_geometry(build("Llama").config))
        LaminaCache(build("Llama"), p)


def test_saving_replaces_an_older_profile(path: Path) -> None:
    profile_of("Llama").save(path)
    profile_of("Qwen2").save(path)
    assert Profile.load(path).model_id == "Qwen2"


def test_the_file_says_what_it_is(path: Path) -> None:
    profile = dataclasses.replace(profile_of("Llama"), tiers=[(4, 2), (2, 8)], absorbed=True)
    profile.save(path)
    meta, tensors = read(path)
    assert meta["format"] == "lamina-profile" and meta["format_version"] == 2
    assert meta["layers"] == [[2, 32], [2, 32]]
    assert meta["tiers"] == [[4, 2], [2, 8]] and meta["absorbed"] is True and meta["transform"] == "balanced"
    assert meta["info"]["tokens"] == 2 * 2 * 384
    assert all(t.dtype == torch.float32 for t in tensors.values())
    loaded = Profile.load(path)
    assert loaded.tiers == [(4, 2), (2, 8)] and loaded.absorbed


def drop(prefix: str) -> Callable[[dict, Tensors], None]:
    def change(meta: dict, tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith(prefix)]:
            del tensors[name]

    return change


def put(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[dict, Tensors], None]:
    def change(meta: dict, tensors: Tensors) -> None:
        tensors[name] = value(tensors[name]).contiguous()

    return change


def set_meta(**values: Any) -> Callable[[dict, Tensors], None]:
    def change(meta: dict, tensors: Tensors) -> None:
        meta.update(values)

    return change


def with_value(x: float) -> Callable[[Tensor], Tensor]:
    def change(t: Tensor) -> Tensor:
        t = t.clone()
        t.view(-1)[7 % t.numel()] = x
        return t

    return change


def singular(t: Tensor) -> Tensor:
    t = t.clone()
    t[1, :, 4] = t[1, :, 5]
    return t


DAMAGE = {
    "other format": (set_meta(format="something"), "is a safetensors file but no Lamina profile"),
    "other version": (set_meta(format_version=3), "profile format 3, this Lamina reads 2"),
    "missing layer": (drop("layers.1."), "layer 1 of 2 is missing"),
    "missing tensor": (drop("layers.0.v_forward"), "layer 0 lacks v_forward"),
    "missing kappa": (drop("layers.1.kappa"), "layer 1 lacks kappa"),
    "wrong head dim": (put("layers.0.k_forward", lambda t: t[:, :16, :16]), r"k_forward has shape \(2, 16, 16\), exp"),
    "wrong heads": (put("layers.1.mean_v", lambda t: t[:1]), r"mean_v has shape \(1, 32\), expected \(2, 32\)"),
    "NaN": (put("layers.0.v_forward", with_value(float("nan"))), "layer 0: v_forward holds NaN or Inf"),
    "Inf": (put("layers.1.kappa", with_value(float("inf"))), "layer 1: kappa holds NaN or Inf"),
    "NaN in a moment": (put("layers.0.moments.c_q", with_value(float("nan"))), "moments.c_q holds NaN or Inf"),
    "singular": (put("layers.1.k_forward", singular), "layer 1: a key basis is singular"),
    "not inverse": (put("layers.0.q_forward", lambda t: 2 * t), "k_forward and q_forward are not inverse"),
    "missing moment": (drop("layers.0.moments.c_v"), "c_v"),
    "other moment shape": (put("layers.0.moments.c_q", lambda t: t[:, :8, :8]), "c_q"),
    "stretched v basis": (put("layers.0.v_forward", lambda t: 2 * t), "v_forward"),
    "missing field": (lambda meta, tensors: meta.pop("layers") and None, "layers"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_each_kind_of_damage_has_its_error(change: Callable[[dict, Tensors], None], message: str, path: Path) -> None:
    profile_of("Llama").save(path)
    meta, tensors = read(path)
    change(meta, tensors)
    save_file(tensors, path, metadata={"lamina": json.dumps(meta)})
    with pytest.raises(ProfileError, match=message) as e:
        Profile.load(path)
    assert str(path) in str(e.value)


def test_a_flipped_bit_is_found(path: Path) -> None:
    profile_of("Llama").save(path)
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ProfileError, match=r"its numbers have the checksum \d+, not \d+ as when written"):
        Profile.load(path)


def test_a_profile_without_a_checksum_as_of_before_is_read(path: Path) -> None:
    profile_of("Llama").save(path)
    with safe_open(path, framework="pt") as f:
        meta, tensors = f.metadata(), {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    meta = {name: x for name, x in json.loads(meta["lamina"]).items() if name != "crc32"}
    save_file(tensors, path, metadata={"lamina": json.dumps(meta)})
    assert len(Profile.load(path).layers) == 2


def test_files_that_are_no_profiles(tmp_path: Path) -> None:
    missing = tmp_path / "missing.lamina"
    with pytest.raises(ProfileError, match=r"there is no profile at .*missing.lamina; make one with `lamina calibrate"):
        Profile.load(missing)
    with pytest.raises(ProfileError, match="there is no profile"):
        Profile.load(tmp_path)
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"not safetensors at all")
    with pytest.raises(ProfileError, match="cannot be read as a profile"):
        Profile.load(garbage)
    plain = tmp_path / "weights.safetensors"
    save_file({"w": torch.zeros(2)}, plain)
    with pytest.raises(ProfileError, match="is a safetensors file but no Lamina profile"):
        Profile.load(plain)
    save_file({"w": torch.zeros(2)}, plain, metadata={"lamina": "{broken"})
    with pytest.raises(ProfileError, match="cannot be read as a profile"):
        Profile.load(plain)
    whole = tmp_path / "cut"
    profile_of("Llama").save(whole)
    whole.write_bytes(whole.read_bytes()[:5000])
    with pytest.raises(ProfileError, match="cannot be read as a profile"):
        Profile.load(whole)
    assert issubclass(ProfileError, LaminaError) and issubclass(ProfileError, ValueError)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("Llama", {"num_hidden_layers": 3}, "layers 2 against 3"),
        ("Llama", {"num_key_value_heads": 4}, "layer 0: KV heads 2 against 4"),
        ("Llama", {"head_dim": 16}, "layer 0: head dimension 32 against 16"),
        ("Llama", {"hidden_size": 128}, "configuration hash"),
        ("Qwen3", {}, "configuration hash"),
    ],
)
def test_a_profile_of_another_model_is_refused(kind: str, changes: dict, message: str) -> None:
    with pytest.raises(ProfileError, match=f"the profile of 'Llama' does not fit this model: {message}"):
        profile_of("Llama").check_model(model_geometry(config(kind, **changes)))
    with pytest.raises(ProfileError, match=message):
        LaminaCache(build(kind, **changes), profile_of("Llama"))


@pytest.mark.parametrize(
    ("name", "options"),
    [("identity", {}), ("hadamard", {}), ("oscar", {"per_head": False}), ("oscar", {"target": "softmax"})],
)
def test_other_transforms_are_derived_from_the_moments(name: str, options: dict) -> None:
    profile = profile_of("Llama")
    derived = profile.with_transform(name, **options)
    assert derived.transform == name and profile.transform == "balanced"
    for ours, base in zip(derived.layers, profile.layers, strict=True):
        expected = make_transform(name, base.moments, n_heads=2, head_dim=32, **options)
        torch.testing.assert_close(ours.transform.k_forward, expected.k_forward.float())
        torch.testing.assert_close(ours.transform.v_forward, expected.v_forward.float())
        assert not ours.kappa.any()
        assert base.moments is not None
        # E|q'|^2 of an orthogonal basis is E|q|^2; values keep their mean there
        trace = base.moments.c_q.diagonal(dim1=1, dim2=2).sum(1)
        torch.testing.assert_close(ours.q_energy.double(), trace, rtol=1e-5, atol=0)
        second = base.moments.c_v + base.moments.mean_v[:, :, None] * base.moments.mean_v[:, None]
        torch.testing.assert_close(ours.v_energy.double(), second.diagonal(dim1=1, dim2=2).sum(1), rtol=1e-5, atol=0)


def test_energies_of_a_basis_that_is_not_orthogonal() -> None:
    layer = profile_of("Qwen2").layers[0]
    assert layer.moments is not None
    q_energy, v_energy = energies(layer.transform, layer.moments)
    read = layer.transform.q_forward.double()
    expected = torch.stack([(read[h].T @ layer.moments.c_q[h] @ read[h]).trace() for h in range(2)])
    torch.testing.assert_close(q_energy.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(v_energy.double(), layer.moments.c_v.diagonal(dim1=1, dim2=2).sum(1), rtol=1e-5, atol=0)


def test_what_cannot_be_derived() -> None:
    bare = dataclasses.replace(profile_of("Llama"), layers=[layer_profile(2, 32)] * 2)
    for name in ("oscar", "balanced"):
        with pytest.raises(ConfigError, match="needs calibration moments"):
            bare.with_transform(name)
    assert bare.with_transform("hadamard").layers[0].q_energy.equal(bare.layers[0].q_energy)
    with pytest.raises(ProfileError, match="derive from the original profile"):
        dataclasses.replace(bare, absorbed=True).with_transform("hadamard")
    with pytest.raises(ConfigError, match="unknown transform"):
        bare.with_transform("pca")
    layer = layer_profile(2, 32)
    assert derive_layer(layer.transform, layer).moments is None
