"""``lamina export-rotations`` and ``lamina import-rotations``: there and back."""

import torch

from lamina.basis.profile import Profile


def test_there_and_back(lamina, tiny, tmp_path):
    k, v, out = tmp_path / "k.pt", tmp_path / "v.pt", tmp_path / "p"
    done = lamina("export-rotations", "--profile", tiny.profile, "--k", k, "--v", v, "--shared")
    assert done.exit_code == 0, done.output
    done = lamina("import-rotations", tiny.model, "--k", k, "--v", v, "-o", out)
    assert done.exit_code == 0, done.output
    expected = Profile.load(tiny.profile).with_transform("oscar", per_head=False)
    for a, b in zip(Profile.load(out).layers, expected.layers):
        assert torch.allclose(a.transform.k_forward, b.transform.k_forward, atol=1e-5)
        assert torch.allclose(a.transform.v_forward, b.transform.v_forward, atol=1e-5)


def test_a_file_that_is_not_there_is_refused(refused, tiny, tmp_path):
    out = tmp_path / "p"
    refused("import-rotations", tiny.model, "--k", "none.pt", "--v", "none.pt", "-o", out, words="none.pt")
    assert not out.exists()
