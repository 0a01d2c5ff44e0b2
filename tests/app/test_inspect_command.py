import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from lamina.app.profile_facts import layer_facts, spread, value_offset
from lamina.app.stored import StoredTensor
from lamina.basis.moments import Moments
from lamina.basis.profile import Profile
from lamina.basis.tuning import Tuning
from lamina.control.config import ControllerConfig
from lamina.control.tuning import as_settings

CACHE_META = {
    "format": "lamina-cache",
    "format_version": 1,
    "package_version": "0.2.0",
    "model_id": "some/model",
    "config_hash": "abc",
    "dtype": "bfloat16",
    "window": {"sink": 64, "recent": 256, "rollback": 64},
    "lengths": [100, 2000],
}


@pytest.fixture
def cache_file(tmp_path):
    def make(**changes):
        meta = {k: v for k, v in {**CACHE_META, **changes}.items() if v is not ...}
        tensors = {
            "layers.0.codes": torch.zeros(10, dtype=torch.uint8),
            "layers.10.codes": torch.zeros(2, 3, dtype=torch.uint8),
            "layers.2.codes": torch.zeros(4, dtype=torch.uint8),
            "layers.2.exact.k": torch.zeros(5, dtype=torch.bfloat16),
            "order": torch.zeros(2, dtype=torch.int64),
            "flags": torch.zeros(3, dtype=torch.bool),
        }
        save_file(tensors, tmp_path / "cache", metadata={"lamina": json.dumps(meta)})
        return tmp_path / "cache"

    return make


def as_json(lamina, file):
    result = lamina("inspect", file, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_profile_as_json(tiny, lamina):
    found = as_json(lamina, tiny.profile)
    profile = Profile.load(tiny.profile)
    assert (found["file"], found["format"]) == (tiny.profile, "lamina-profile")
    assert found["model_id"] == profile.model_id
    assert found["config_hash"] == profile.config_hash
    assert (found["tokens"], found["max_position"], found["random_positions"]) == (1024, 4096, True)
    assert (found["transform"], found["tiers"], found["absorbed"]) == ("balanced", ["k4v2", "k4v2"], False)
    assert (found["has_moments"], found["n_layers"]) == (True, 2)
    assert found["file_bytes"] > 10_000
    for i, layer in enumerate(found["layers"]):
        stored = profile.layers[i]
        assert (layer["layer"], layer["n_heads"], layer["head_dim"]) == (i, 2, 16)
        singular = torch.linalg.svdvals(stored.transform.k_forward.double())
        assert layer["condition"] == pytest.approx(float((singular[:, 0] / singular[:, -1]).max()))
        eigenvalues = [torch.linalg.eigvalsh(c) for c in stored.moments.c_k]
        assert layer["key_spread"] == pytest.approx(max(float(e[-1] / e[0]) for e in eigenvalues))
        assert layer["kappa"] == pytest.approx(float(stored.kappa[:, 0, 0].mean()))
        assert layer["q_energy"] == pytest.approx(float(stored.q_energy.mean()))
        assert layer["v_energy"] == pytest.approx(float(stored.v_energy.mean()))
        assert 0 < layer["value_offset"] < 1


def test_a_profile_as_tables(tiny, lamina):
    result = lamina("inspect", tiny.profile)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for part in ("2 layers, 2 KV heads of dimension 16", "k4v2 in every layer", "random, up to 4,096", "moments kept"):
        assert part in text
    (row,) = [line.split() for line in result.stdout.splitlines() if line.split()[:1] == ["1"]]
    layer = as_json(lamina, tiny.profile)["layers"][1]
    names = ("condition", "key_spread", "kappa", "q_energy", "v_energy", "value_offset")
    assert row[1:] == [*(f"{layer[name]:.3g}" for name in names), "-", "-"]


def test_a_tuned_profile(tiny, lamina, tmp_path):
    drift = [[0.4, 0.02, 0.001], [0.1, 0.01, 0.0], [0.3, 0.02, 0.0], [0.2, 0.01, 0.0]]
    settings = as_settings(ControllerConfig(policy="threshold", tau0=0.005))
    tuning = Tuning([(1.0, 2.0)] * 2, drift, settings, {"goal": "mean KL up to 0.01 nats"})
    dataclasses.replace(Profile.load(tiny.profile), tuning=tuning).save(tmp_path / "p")
    found = as_json(lamina, tmp_path / "p")
    assert [(one["output_kl_k2"], one["output_kl_v2"]) for one in found["layers"]] == [(0.4, 0.1), (0.3, 0.2)]
    assert found["tuning"]["settings"]["tau0"] == 0.005
    text = " ".join(lamina("inspect", tmp_path / "p").stdout.split())
    assert "controller policy threshold, tau0 0.005 tuned for mean KL up to 0.01 nats" in text


def test_a_profile_without_moments(tiny, lamina, tmp_path):
    profile = Profile.load(tiny.profile)
    bare = [dataclasses.replace(layer, moments=None) for layer in profile.layers]
    dataclasses.replace(profile, layers=bare, tiers=[(2, 2), (4, 2)], info={}).save(tmp_path / "p")
    found = as_json(lamina, tmp_path / "p")
    assert found["has_moments"] is False
    assert found["tokens"] is found["max_position"] is found["layers"][0]["key_spread"] is None
    text = " ".join(lamina("inspect", tmp_path / "p").stdout.split())
    for part in ("0: 2, 1: k4v2", "tokens not recorded", "positions not recorded", "moments not kept"):
        assert part in text


def test_layers_that_are_not_packed_are_left_out(tiny, lamina, monkeypatch):
    profile = Profile.load(tiny.profile)
    hybrid = dataclasses.replace(profile, layers=[None, profile.layers[1]])
    monkeypatch.setattr(Profile, "load", lambda path: hybrid)
    found = as_json(lamina, tiny.profile)
    assert found["n_layers"] == 2
    assert [layer["layer"] for layer in found["layers"]] == [1]
    assert "2 layers, 1 of them not packed, 2 KV heads" in " ".join(lamina("inspect", tiny.profile).stdout.split())


def test_figures_of_heads_are_the_worst_or_the_mean(tiny):
    layer = Profile.load(tiny.profile).layers[0]
    layer.transform.k_forward[0] = torch.diag(torch.tensor([8.0] + [1.0] * 15))
    layer.transform.k_forward[1] = torch.eye(16)
    layer.kappa[:, 0, 0] = torch.tensor([0.1, 0.3])
    facts = layer_facts(7, layer)
    assert facts.layer == 7
    assert facts.condition == pytest.approx(8)
    assert facts.kappa == pytest.approx(0.2)


def test_spread():
    moment = torch.diag_embed(torch.tensor([[1.0, 2.0, 8.0], [1.0, 1.0, 3.0]]).double())
    assert spread(moment) == pytest.approx(8)
    assert spread(torch.zeros(1, 2, 2)) == pytest.approx(1 / torch.finfo(torch.float32).eps)


@pytest.mark.parametrize(
    ("mean", "spread_of_v", "expected"), [(0.0, 1.0, 0.0), (3.0, 0.0, 1.0), (3.0, 4.0, 0.6), (0, 0, 0)]
)
def test_value_offset(mean, spread_of_v, expected):
    zero = torch.zeros(1, 2, 2).double()
    mean_v = torch.tensor([[mean, 0.0]]).double()
    c_v = torch.diag_embed(torch.tensor([[spread_of_v**2, 0.0]]).double())
    assert value_offset(Moments(zero, zero, mean_v, c_v, zero, zero)) == pytest.approx(expected)


def test_a_saved_cache(lamina, cache_file):
    found = as_json(lamina, cache_file())
    for field in ("format", "model_id", "config_hash", "package_version", "dtype", "window", "lengths"):
        assert found[field] == CACHE_META[field]
    assert found["n_layers"] == 3
    assert list(found["bytes_by_layer"].items()) == [("0", 10), ("2", 14), ("10", 6)]
    assert found["bytes_by_name"] == {"codes": 20, "exact.k": 10, "order": 16, "flags": 3}
    text = " ".join(lamina("inspect", cache_file()).stdout.split())
    for part in ("some/model", "Lamina 0.2.0", "sink 64, recent 256, rollback 64", "100, 2,000 tokens", "exact.k 10 B"):
        assert part in text


def test_a_cache_that_records_less(lamina, cache_file):
    file = cache_file(model_id=..., lengths=..., window=...)
    found = as_json(lamina, file)
    assert found["model_id"] is found["lengths"] is found["window"] is None
    assert lamina("inspect", file).stdout.count("not recorded") == 3


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("U8", 6), ("BF16", 12), ("F32", 24), ("I64", 48), ("BOOL", 6), ("F8_E4M3", 6)],
)
def test_bytes_of_stored_tensors(dtype, expected):
    assert StoredTensor((2, 3), dtype).n_bytes == expected


def test_other_files_are_refused(refused, tmp_path):
    file = tmp_path / "file"
    refused("inspect", file, words="no file lamina calibrate")
    refused("inspect", tmp_path, words="no file")
    file.write_bytes(b"junk")
    refused("inspect", file, words="no safetensors file")
    save_file({"a": torch.zeros(1)}, file)
    refused("inspect", file, words="Lamina did not write it")
    save_file({"a": torch.zeros(1)}, file, metadata={"lamina": "{"})
    refused("inspect", file, words="metadata is damaged")
    for meta in ("[]", '"lamina-profile"'):
        save_file({"a": torch.zeros(1)}, file, metadata={"lamina": meta})
        refused("inspect", file, words="Lamina did not write it")
    for meta in ('{"format": "lamina-plan"}', "{}", '{"format": []}'):
        save_file({"a": torch.zeros(1)}, file, metadata={"lamina": meta})
        refused("inspect", file, words="format does not know")


def test_a_damaged_profile_is_refused_with_its_reason(tiny, refused, tmp_path):
    profile = Profile.load(tiny.profile)
    profile.layers[0].kappa[0, 0, 0] = float("nan")
    profile.save(tmp_path / "p")
    refused("inspect", tmp_path / "p", words="layer 0 kappa NaN")
