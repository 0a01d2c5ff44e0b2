"""RotationZoo files: what is read, what is written, and what is refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lamina.basis.rotation_zoo import load_rotation_zoo, save_rotation_zoo
from lamina.errors import ConfigError, ProfileError

LAYERS, HEADS, DIM = 3, 2, 16


def rotations(layers: int = LAYERS, heads: int = HEADS, dim: int = DIM) -> Tensor:
    noise = torch.randn(layers, heads, dim, dim, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return torch.linalg.qr(noise).Q.float()


def zoo_state(rotation_lhdd: Tensor, version: int | str) -> dict:
    """A file as OSCAR's tools write it, layers out of order."""
    layers = {
        layer: {
            "layer_id": layer,
            "rotation": rotation_lhdd[layer] if version == 2 else rotation_lhdd[layer, 0],
            "eigenvalues": torch.ones(DIM),
        }
        for layer in reversed(range(len(rotation_lhdd)))
    }
    return {
        "format_version": version,
        "objective": "qqt_r_h_pbr",
        "source_grouping": "layer",
        "calibration": {"tokens": 30_000, "model_revision": None, "created_at_unix": 1.5},
        "layers": layers,
    }


def write(directory: Path, state: object) -> Path:
    path = directory / "k_rotation_qqt_r_h_pbr.pt"
    torch.save(state, path)
    return path


def load(path: Path) -> Tensor:
    return load_rotation_zoo(path, n_layers=LAYERS, n_kv_heads=HEADS, head_dim=DIM)


def test_version_1_is_repeated_for_every_head(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, zoo_state(rotations(), 1)))
    assert loaded.dtype == torch.float32
    assert loaded.shape == (LAYERS, HEADS, DIM, DIM)
    for head in range(HEADS):
        assert torch.equal(loaded[:, head], rotations()[:, 0])


def test_version_2_keeps_layers_and_heads_apart(tmp_path: Path) -> None:
    assert torch.equal(load(write(tmp_path, zoo_state(rotations(), 2))), rotations())


def test_layer_indices_may_be_text(tmp_path: Path) -> None:
    state = zoo_state(rotations(), 2)
    state["layers"] = {str(layer): entry for layer, entry in state["layers"].items()}
    assert torch.equal(load(write(tmp_path, state)), rotations())


def test_identity_files_are_one_matrix_a_layer(tmp_path: Path) -> None:
    eye = torch.eye(DIM).expand(LAYERS, 1, DIM, DIM)
    assert torch.equal(load(write(tmp_path, zoo_state(eye, "identity-v1"))), eye.expand(-1, HEADS, -1, -1))


def test_bf16_files_pass_the_orthogonality_check_unchanged(tmp_path: Path) -> None:
    rounded = rotations().bfloat16()
    loaded = load(write(tmp_path, zoo_state(rounded, 2)))
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, rounded.float())


def test_packed_rows_are_rows_times_the_matrix(tmp_path: Path) -> None:
    shift = torch.eye(DIM).roll(1, dims=1)  # row i holds its one in column i + 1
    rotation = load(write(tmp_path, zoo_state(shift.expand(LAYERS, HEADS, DIM, DIM), 2)))[0, 0]
    row = torch.arange(DIM, dtype=torch.float32)
    assert torch.equal(row @ rotation, row.roll(1))


def broken(change) -> dict:
    state = zoo_state(rotations(), 2)
    change(state)
    return state


def set_rotation(layer: int, rotation: Tensor):
    return lambda state: state["layers"][layer].update(rotation=rotation)


def set_entry(layer: int, head: int, value: float):
    def change(state: dict) -> None:
        rotation = state["layers"][layer]["rotation"].clone()
        rotation[head, 4, 5] = value
        state["layers"][layer]["rotation"] = rotation

    return change


FAULTS = {
    "a tensor": (torch.eye(DIM), "is no RotationZoo file"),
    "no layers": (broken(lambda s: s.pop("layers")), "is no RotationZoo file"),
    "no version": (broken(lambda s: s.pop("format_version")), "is no RotationZoo file"),
    "moments file": (broken(lambda s: s["layers"][1].pop("rotation")), "is no RotationZoo file: layer 1"),
    "integer matrix": (broken(set_rotation(1, torch.eye(DIM).long())), "is no RotationZoo file: layer 1"),
    "version 3": (broken(lambda s: s.update(format_version=3)), "unknown format_version 3"),
    "odd version": (broken(lambda s: s.update(format_version=[2])), r"unknown format_version \[2\]"),
    "missing layers": (broken(lambda s: [s["layers"].pop(i) for i in (0, 2)]), "lacks layers 0, 2 of 3"),
    "surplus layer": (broken(lambda s: s["layers"].update({3: s["layers"][0]})), "has layers 3, .* only 3"),
    "heads": (broken(set_rotation(2, rotations(1, 4)[0])), "layer 2: rotations for 4 KV heads, .* has 2"),
    "head dim": (broken(set_rotation(0, rotations(1, 2, 32)[0])), r"layer 0: .*\(2, 32, 32\), .* head dim is 16"),
    "not square": (broken(set_rotation(0, torch.ones(2, 16, 8))), r"layer 0: .*\(2, 16, 8\), .* head dim is 16"),
    "no head axis": (broken(set_rotation(1, torch.eye(DIM))), r"layer 1: .*\(16, 16\), .*\[n_kv_heads, D, D\]"),
    "nan": (broken(set_entry(1, 1, float("nan"))), "layer 1: .*NaN or Inf"),
    "inf": (broken(set_entry(2, 0, float("inf"))), "layer 2: .*NaN or Inf"),
    "skewed head": (broken(set_entry(1, 1, 0.9)), "layer 1: .*not orthogonal"),
    "scaled": (broken(set_rotation(0, rotations()[0] * 1.01)), "layer 0: .*not orthogonal"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_own_error(tmp_path: Path, fault: str) -> None:
    state, message = FAULTS[fault]
    with pytest.raises(ProfileError, match=message):
        load(write(tmp_path, state))


def test_a_head_axis_in_version_1_is_refused(tmp_path: Path) -> None:
    state = zoo_state(rotations(), 2) | {"format_version": 1}
    with pytest.raises(ProfileError, match=r"layer 0: .*\(2, 16, 16\), .*\[D, D\]"):
        load(write(tmp_path, state))


def test_unreadable_files(tmp_path: Path) -> None:
    path = write(tmp_path, zoo_state(rotations(), 1))
    with pytest.raises(ProfileError, match=r"absent\.pt' cannot be read"):
        load(tmp_path / "absent.pt")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ProfileError, match="cannot be read"):
        load(path)
    path.write_text("not a checkpoint")
    with pytest.raises(ProfileError, match="cannot be read"):
        load(path)


class Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def test_code_in_a_file_does_not_run(tmp_path: Path) -> None:
    path = write(tmp_path, zoo_state(rotations(), 1) | {"calibration": Payload(tmp_path / "ran")})
    with pytest.raises(ProfileError, match="cannot be read"):
        load(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["k", "v"])
def test_saving_per_head(tmp_path: Path, kind) -> None:
    path = tmp_path / "rotation.pt"
    save_rotation_zoo(path, rotations().double(), kind=kind, per_head=True)
    state = torch.load(path, weights_only=True)
    assert state["format_version"] == 2
    assert state["objective"] == f"lamina_{kind}"
    assert list(state["layers"]) == list(range(LAYERS))
    for layer, entry in state["layers"].items():
        assert entry["layer_id"] == layer
        assert entry["rotation"].dtype == torch.float32
        assert torch.equal(entry["rotation"], rotations()[layer])
    assert torch.equal(load(path), rotations())


def test_saving_one_matrix_a_layer(tmp_path: Path) -> None:
    path = tmp_path / "rotation.pt"
    shared = rotations()[:, :1].expand(-1, HEADS, -1, -1)
    save_rotation_zoo(path, shared, kind="k", per_head=False)
    state = torch.load(path, weights_only=True)
    assert state["format_version"] == 1
    for layer, entry in state["layers"].items():
        assert torch.equal(entry["rotation"], rotations()[layer, 0])
        assert entry["rotation"].untyped_storage().nbytes() == DIM * DIM * 4
    assert torch.equal(load(path), shared)


def with_nan() -> Tensor:
    bad = rotations()
    bad[2, 1, 0, 0] = float("nan")
    return bad


@pytest.mark.parametrize(
    ("bad", "options", "message"),
    [
        (rotations(), {"kind": "q"}, "kind is 'q'"),
        (rotations()[0], {}, r"shape \(2, 16, 16\)"),
        (rotations()[..., :8], {}, r"shape \(3, 2, 16, 8\)"),
        (rotations()[:0], {}, r"shape \(0, 2, 16, 16\)"),
        (rotations() * 1.5, {}, "layer 0: .*orthogonal matrices only"),
        (with_nan(), {}, "layer 2: .*orthogonal matrices only"),
        (rotations(), {"per_head": False}, "layer 0: the heads have different rotations; use per_head=True"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(tmp_path: Path, bad: Tensor, options: dict, message: str) -> None:
    path = tmp_path / "rotation.pt"
    with pytest.raises(ConfigError, match=message):
        save_rotation_zoo(path, bad, **({"kind": "k", "per_head": True} | options))
    assert not path.exists()
