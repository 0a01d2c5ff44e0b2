"""Kernels of ``lamina.attention.cuda`` on the CPU: the same sources compiled with g++, a fiber for each CUDA thread."""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.attention.cuda.nvrtc import KernelError, source_of

COMPILER = shutil.which("g++")
FLAGS = (
    "-std=c++17", "-O1", "-march=native", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-fsigned-char",
    "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv", "-ftrivial-auto-var-init=pattern",
)  # fmt: skip
KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\s*\(')
EMPTY = torch.empty

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="kernels run on the CPU with g++, which is not there")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")


class HostModule:
    """Kernels of one source file, as :class:`lamina.attention.cuda.nvrtc.Module` but for tensors on the CPU.

    Parameters
    ----------
    name : str
        File of ``lamina/attention/cuda``, without its ending.
    defines : dict
        Macros.
    device : torch.device
        The CPU.
    source : str, optional
        CUDA C++ to take in place of that file's.
    """

    def __init__(self, name: str, defines: dict[str, int], device: torch.device, source: str | None = None) -> None:
        self.device = torch.device(device)
        if self.device.type != "cpu":
            raise KernelError(f"kernels run on the CPU here, not on {device}")
        source = source_of(name) if source is None else source
        self.names, self.launches = KERNEL.findall(source), 0
        first = [Path(__file__).with_name(f"{part}.hpp").read_text(encoding="utf-8") for part in ("fibers", "device")]
        macros = [f"#define {macro} {value}\n" for macro, value in defines.items()]
        kernels = [f"HOST_KERNEL({kernel})\n" for kernel in self.names]
        self.library = _library("".join([*first, *macros, f'#line 1 "{name}.cu"\n', source, "\n", *kernels, "}\n"]))

    def launch(
        self, name: str, grid: Sequence[int], threads: int, *arguments: Any, shared: int = 0, early: bool = False
    ) -> None:
        """Run a kernel to its end."""
        if name not in self.names:
            raise KernelError(f"there is no kernel {name}, only {', '.join(self.names)}")
        values = [_argument(x) for x in arguments]
        sizes_of = getattr(self.library, f"host_sizes_{name}")
        sizes_of.restype = ctypes.POINTER(ctypes.c_int)
        expected: list[int] = []
        for size in sizes_of():
            if not size:
                break
            expected.append(size)
        if len(values) != len(expected):
            raise KernelError(f"{name} takes {len(expected)} arguments, not {len(values)}")
        for i, (value, size) in enumerate(zip(values, expected)):
            if ctypes.sizeof(value) != size:
                raise KernelError(f"argument {i} of {name} has {ctypes.sizeof(value)} bytes instead of {size}")
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values))
        function = getattr(self.library, f"host_{name}")
        function.restype = ctypes.c_char_p
        error = function((ctypes.c_uint * 3)(*grid), threads, shared, self.launches, pointers)
        self.launches += 1
        if error:
            raise KernelError(f"{name}: {error.decode()}")


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        if x.device.type != "cpu":
            raise KernelError(f"a tensor is on {x.device}")
        return ctypes.c_void_p(x.data_ptr())
    if isinstance(x, float):
        return ctypes.c_float(x)
    return ctypes.c_int(x) if isinstance(x, int) else x


@cache
def _library(text: str) -> ctypes.CDLL:
    """Compiled earlier, by this process or another one, or now. Further flags are taken from LAMINA_HOST_FLAGS."""
    if COMPILER is None:
        raise KernelError("there is no g++")
    flags = (*FLAGS, *os.environ.get("LAMINA_HOST_FLAGS", "").split())
    folder = Path(tempfile.gettempdir()) / f"lamina-host-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise KernelError(f"{folder} belongs to somebody else")
    path = folder / f"{hashlib.sha256(repr((COMPILER, flags, text)).encode()).hexdigest()[:32]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as build:
            source, built = Path(build) / "kernels.cpp", Path(build) / "kernels.so"
            source.write_text(text, encoding="utf-8")
            done = subprocess.run([COMPILER, *flags, str(source), "-o", str(built)], capture_output=True, text=True)
            if done.returncode:
                raise KernelError(f"the kernel does not compile for the CPU:\n{done.stderr[:5000]}")
            built.replace(path)
    return ctypes.CDLL(str(path))


def on_host(monkeypatch: pytest.MonkeyPatch, module: ModuleType, processors: int = 2) -> None:
    """Have a module that launches kernels run them on the CPU, in memory that is not left as it happens to be.

    The module calls ``Module(name, defines, device)`` in a cached function ``_module``, and may ask for ``processors``.
    """
    monkeypatch.setattr(module, "Module", HostModule)
    monkeypatch.setattr(module, "_module", cache(module._module.__wrapped__))
    if hasattr(module, "processors"):
        monkeypatch.setattr(module, "processors", lambda device: processors)
    monkeypatch.setattr(torch, "empty", _filled)


def _filled(*shape: Any, **options: Any) -> Tensor:
    x = EMPTY(*shape, **options)
    return x.fill_(float("nan") if x.is_floating_point() else 0 if x.dtype == torch.bool else torch.iinfo(x.dtype).max)
