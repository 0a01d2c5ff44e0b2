import csv
import json
from itertools import pairwise

import pytest
import torch

from lamina.basis.calibrate import calibrate
from lamina.basis.profile import Profile
from lamina.eval.ablation import Ablation, Rotation, mean_interval
from lamina.eval.fidelity import measure_fidelity
from lamina.eval.studies import STUDIES, calibration_study, parse_studies
from lamina.pages import WindowConfig
from tiny_models import build, profile_of, tokens

IDS = tokens(1, 384, 7)
SMALL = WindowConfig(64, 64)


@pytest.fixture(scope="module")
def studied():
    """Studies of a tiny model with heads of 32 channels."""
    run = Ablation(build("Llama"), profile_of("Llama"), [IDS], SMALL)
    results = {name: run.run(study) for name, study in STUDIES.items() if study.arms}
    return {name: {f.arm: f for f in r.findings} for name, r in results.items()}, results, run


@pytest.fixture
def ablate(tiny, lamina, text_file):
    def run(*args, command="ablate"):
        base = (command, "--model", tiny.model, "--profile", tiny.profile, "--text", text_file)
        return lamina(*base, "--tokens", 448, *args)

    return run


def test_arms_of_the_rotation_study_really_differ(studied):
    found = studied[0]["rotation"]
    kl = {name: f.kl for name, f in found.items()}
    assert kl["U H P"] == pytest.approx(kl["U H"], rel=1e-3), "one scale a row: the order of channels is nothing"
    different = sorted(value for name, value in kl.items() if name != "U H")
    assert len(different) == 7 and all(b > (1 + 1e-5) * a > 0 for a, b in pairwise(different))
    assert kl["lamina"] < min(kl["balanced"], kl["U H P"])


def test_a_rotation_is_made_of_the_parts_it_names():
    profile = profile_of("Llama")
    published = profile.with_transform("oscar", per_head=False)
    for ours, theirs in zip(Rotation().profile(profile).layers, published.layers, strict=True):
        torch.testing.assert_close(ours.transform.k_forward, theirs.transform.k_forward)
        torch.testing.assert_close(ours.transform.v_forward, theirs.transform.v_forward)
        assert not ours.kappa.any()
    moments = profile.layers[0].moments
    u = Rotation(k="K'K", v="V'V", mix="U", per_head=True).transform(moments)
    raw_v = moments.c_v + torch.einsum("hi,hj->hij", moments.mean_v, moments.mean_v)
    for basis, matrix in ((u.k_forward, moments.c_k), (u.v_forward, raw_v)):
        turned = basis.mT @ matrix @ basis
        diagonal = turned.diagonal(dim1=-2, dim2=-1)
        assert (turned - torch.diag_embed(diagonal)).abs().max() < 1e-9 * diagonal.max()
        assert (diagonal.diff() <= 1e-12).all(), "largest first"
    spread = Rotation(mix="U H", per_head=True).transform(moments).v_forward
    assert not torch.allclose(spread, Rotation(per_head=True).transform(moments).v_forward)
    with pytest.raises(ValueError, match="unknown part 'UHP'"):
        Rotation(mix="UHP")


def test_each_study_varies_what_it_says(studied):
    found = studied[0]
    window, clip, codec = found["window"], found["clip"], found["codec"]
    assert window["oscar S 0 R 0"].kl > 1.2 * window["oscar S 64 R 0"].kl > window["oscar S 64 R 64"].kl
    assert clip["K 0.96"].kl == clip["V 0.92"].kl != clip["K 0.92"].kl
    assert len({f.kl for f in clip.values()}) > 6
    assert codec["no page center"].bits_history < codec["lamina"].bits_history
    assert codec["minmax"].kl > codec["no mass correction"].kl > 0
    assert len({f.kl for f in codec.values()}) == len(codec)
    assert len({f.kl for f in found["target"].values()}) == len(found["target"])


def test_groups_are_simulated_say_so_and_equal_pages_where_both_exist(studied):
    found, results, _ = studied
    assert results["group"].left_out == ["128, U H", "128, U H P", "64, U H", "64, U H P"]
    assert results["group"].against == "32, U H"
    whole, stored = found["group"]["32, U H P"], found["rotation"]["U H P"]
    assert whole.simulated and not stored.simulated
    assert whole.kl == pytest.approx(stored.kl, rel=1e-3)
    assert whole.bits_history == 3.0  # 2 bits, 32 for scale and midpoint of 32 channels


def test_smaller_groups_err_less_and_cost_more():
    model = build("Llama", head_dim=64)
    profile = calibrate(model, [tokens(2, 384, 100)])
    result = Ablation(model, profile, [IDS], SMALL).run(STUDIES["group"])
    found = {f.arm: f for f in result.findings}
    assert list(found) == ["64, U H", "64, U H P", "32, U H", "32, U H P"]
    assert [f.bits_history for f in found.values()] == [2.5, 2.5, 3.0, 3.0]
    assert found["32, U H P"].kl < found["64, U H P"].kl
    assert found["64, U H P"].kl == pytest.approx(found["64, U H"].kl, rel=1e-3)
    assert found["32, U H P"].kl != pytest.approx(found["32, U H"].kl, rel=1e-2), "here the order of channels counts"


def test_figures_are_those_of_fidelity_and_shared_arms_run_once(studied, monkeypatch):
    found, _, run = studied
    arm = STUDIES["rotation"].arms[4]
    (result,) = measure_fidelity(run.model, run.profile, [arm], [IDS], window=SMALL)
    ours = found["rotation"]["U H P"]
    assert (ours.kl, ours.top1, ours.bits_history) == pytest.approx((result.kl_mean, result.top1, result.bits_history))
    assert ours.kl_low < ours.kl < ours.kl_high and (ours.more, ours.more_low, ours.more_high) == (0, 0, 0)
    monkeypatch.setattr("lamina.eval.ablation.measure_fidelity", None)
    again = {f.arm: f for f in run.run(STUDIES["clip"]).findings}
    assert again["K 0.96"].kl == ours.kl
    u = found["rotation"]["U"]
    assert u.more == pytest.approx(u.kl - ours.kl) and u.more_low < u.more < u.more_high


def test_intervals_are_those_of_resampled_blocks():
    blocks = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mean, low, high = mean_interval(blocks)
    half = 1.96 * float(blocks.std()) / 20
    assert mean == pytest.approx(float(blocks.mean()))
    assert (mean - low, high - mean) == pytest.approx((half, half), rel=0.1)


def test_calibrations_are_compared_by_name(tiny, lamina, text_file, tmp_path):
    other = Profile.load(tiny.profile).with_transform("identity")
    other.save(tmp_path / "plain.profile")
    args = ("--study", "calibration", "--other-profile", tmp_path / "plain.profile", "--tokens", 448, "--json")
    result = lamina("ablate", "--model", tiny.model, "--profile", tiny.profile, "--text", text_file, *args)
    assert result.exit_code == 0, result.output
    (study,) = json.loads(result.stdout)["studies"]
    assert [arm["arm"] for arm in study["arms"]] == ["tiny", "plain"]
    first, second = study["arms"]
    assert first["kl"] != second["kl"] and second["what"].endswith("identity")
    assert calibration_study([("a", other), ("b", other)]).against == "a"


def test_tables_and_csv(ablate, tmp_path):
    out = tmp_path / "folder" / "ablation.csv"
    result = ablate("--study", "clip", "--study", "rotation", "--csv", out, "--sink", 0, "--recent", 64)
    assert result.exit_code == 0, result.output
    assert result.stdout.index("clip: OSCAR's clip ratios") < result.stdout.index("rotation: bases of K and V")
    assert "which changes nothing while one scale" in result.stdout and "group:" not in result.stdout
    assert "Study clip" in result.stderr and "10 arms on 448 tokens" in result.stderr
    rows = list(csv.DictReader(out.open()))
    assert [r["study"] for r in rows] == ["clip"] * 10 + ["rotation"] * 8
    assert {r["recent"] for r in rows} == {"64"} and {r["sink"] for r in rows} == {"0"}
    assert float(rows[0]["kl"]) > 0 and rows[2]["arm"] == rows[2]["against"] == "K 0.96"


def test_what_does_not_fit_is_left_out_with_its_reason(ablate):
    result = ablate("--study", "group", "--study", "target", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["left_out"] == ["group: the model's heads cannot be cut into such groups"]
    assert [s["study"] for s in report["studies"]] == ["target"]
    assert [s.name for s in parse_studies(())] == list(STUDIES)


def test_the_csv_of_a_run_that_stops_holds_the_studies_that_were_done(ablate, tmp_path, monkeypatch):
    run = Ablation.run

    def stops(self, study, progress=None):
        if study.name == "clip":
            raise KeyboardInterrupt
        return run(self, study, progress)

    monkeypatch.setattr(Ablation, "run", stops)
    assert ablate("--study", "target", "--study", "clip", "--csv", tmp_path / "a.csv").exit_code != 0
    assert [row["study"] for row in csv.DictReader((tmp_path / "a.csv").open())] == ["target"] * 5


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ("--study", "rotations"),
            "unknown study rotations; rotation, target, window, clip, group, codec, calibration",
        ),
        (("--study", "calibration"), "compares profiles --other-profile"),
        (("--study", "group"), "nothing to run; group"),
        (("--study", "clip", "--sink", 1), "sink=1"),
        (("--study", "clip", "--seq-len", 5000), "5000 exceed 4096 --seq-len"),
        (("--study", "clip", "--csv", "."), "is a folder ablation.csv"),
        (("--study", "clip", "--profile", "missing"), "no profile at missing"),
    ],
)
def test_wrong_settings(tiny, refused, text_file, args, words):
    base = ("ablate", "--model", tiny.model, "--profile", tiny.profile, "--text", text_file, "--tokens", 448)
    refused(*base, *args, words=words)


def test_a_profile_without_moments_is_refused(tiny, refused, text_file, tmp_path):
    profile = Profile.load(tiny.profile)
    for layer in profile.packed.values():
        layer.moments = None
    profile.save(tmp_path / "bare.profile")
    args = ("--profile", tmp_path / "bare.profile", "--text", text_file, "--study", "clip")
    refused("ablate", "--model", tiny.model, *args, words="no moments lamina calibrate")


def test_stages_as_tables_json_and_csv(ablate, tmp_path):
    arms = ("--arms", "naive-int8,kivi-int2")
    result = ablate(*arms, "--csv", tmp_path / "s.csv", command="stages")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "kivi-int2*" in text and "* simulated" in text and "kivi-int2 (simulated), by layer" in text
    rows = list(csv.DictReader((tmp_path / "s.csv").open()))
    assert [(r["arm"], r["layer"]) for r in rows][:4] == [
        ("naive-int8", "0"), ("naive-int8", "1"), ("naive-int8", "mean"), ("kivi-int2", "0"),
    ]  # fmt: skip
    assert [r["simulated"] for r in rows] == ["False"] * 3 + ["True"] * 3
    report = json.loads(ablate(*arms, "--json", command="stages").stdout)
    assert report["stages"] == ["cache_k", "cache_v", "logits", "output", "hidden"]
    fine, coarse = report["arms"]
    for name in report["stages"]:
        assert fine["mean"][name] < 0.01 < 5 * coarse["mean"][name] + 0.005
        assert float(rows[0][name]) == pytest.approx(fine["layers"][0][name], rel=1e-4)
        assert coarse["layers"][1][name] > 10 * fine["layers"][1][name]


def test_stages_of_live_arms_are_refused(tiny, refused, text_file):
    base = ("stages", "--model", tiny.model, "--profile", tiny.profile, "--text", text_file)
    refused(*base, "--arms", "lamina-live-3", words="lamina-live-3 decides fixed")
