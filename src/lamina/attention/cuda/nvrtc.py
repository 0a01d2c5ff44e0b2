"""CUDA C++ compiled at run time with the NVRTC that comes with torch, and launched on torch's stream."""

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lamina.errors import LaminaError

MOST_DYNAMIC_SHARED = 8
"""Number of the driver's function attribute."""
PROGRAMMATIC_SERIALIZATION = 6
"""Number of the driver's launch attribute."""
EARLY_SINCE = 9
"""Compute capability from which on kernels can wait for the one in front of them."""
OPTIONS = ("--std=c++17", "--device-as-default-execution-space")


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))

    def __init__(self, identity: int, value: int) -> None:
        super().__init__(identity, 0, value)


class _Config(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", ctypes.c_uint),
    )


class KernelError(LaminaError):
    """A kernel cannot be compiled or launched here."""


@cache
def _nvrtc() -> Any:
    names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    spec = find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        names += sorted(str(p) for p in Path(folder).glob("*/lib/libnvrtc.so*"))
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise KernelError("there is no NVRTC library, which comes with torch for CUDA; install torch with CUDA")


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelError(f"there is no NVIDIA driver: {error}") from error


SOURCES = {
    "decode": ("pages", "lanes", "slabs", "reader", "decode"),
    "encode": ("pages", "lanes", "encode"),
    "prefill": ("pages", "lanes", "prefill", "prefill_exact"),
    "rows": ("pages", "rows"),
    "tables": ("tables",),
}
"""Files of this folder that make up a source, behind ``device.cu``."""


def source_of(name: str) -> str:
    """CUDA C++ of a source, all but ``device.cu``, for which another compiler has its own."""
    folder = files("lamina.attention.cuda")
    return "".join(folder.joinpath(f"{part}.cu").read_text(encoding="utf-8") for part in SOURCES[name])


class Module:
    """Kernels of one source.

    Parameters
    ----------
    name : str
        One of :data:`SOURCES`.
    defines : dict
        Macros.
    device : torch.device
        What it is compiled for and loaded on.
    """

    def __init__(self, name: str, defines: dict[str, int], device: torch.device) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        options = [*OPTIONS, f"--gpu-architecture=sm_{major}{minor}", *(f"-D{k}={v}" for k, v in defines.items())]
        device_part = files("lamina.attention.cuda").joinpath("device.cu").read_text(encoding="utf-8")
        binary = _compile(device_part + source_of(name), options)
        self.device, self.module, self.starts_early = device, ctypes.c_void_p(), major >= EARLY_SINCE
        with torch.cuda.device(device):
            torch.cuda.current_stream()
            _check(_driver().cuModuleLoadData(ctypes.byref(self.module), binary), "cuModuleLoadData")
        self.functions: dict[str, ctypes.c_void_p] = {}

    def launch(
        self, name: str, grid: Sequence[int], threads: int, *arguments: Any, shared: int = 0, early: bool = False
    ) -> None:
        """Launch a kernel; tensors are passed as pointers, int as 32 bits, ctypes values as they are.

        ``shared`` is the shared memory of a block in bytes that the launch provides. A kernel launched ``early`` may
        start before the one in front of it has finished, for which it has to wait itself, where the GPU can do that.
        """
        if name not in self.functions:
            found = ctypes.c_void_p()
            _check(_driver().cuModuleGetFunction(ctypes.byref(found), self.module, name.encode()), name)
            if shared > 48 * 1024:
                _check(_driver().cuFuncSetAttribute(found, MOST_DYNAMIC_SHARED, shared), name)
            self.functions[name] = found
        values = [_argument(x) for x in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        attribute = _Attribute(PROGRAMMATIC_SERIALIZATION, 1)
        config = _Config(
            *grid, threads, 1, 1, shared, stream, ctypes.pointer(attribute), int(early and self.starts_early)
        )  # fmt: skip
        _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self.functions[name], pointers, None), name)


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        return ctypes.c_void_p(x.data_ptr())
    if isinstance(x, float):
        return ctypes.c_float(x)
    return ctypes.c_int(x) if isinstance(x, int) else x


def _compile(source: str, options: list[str]) -> bytes:
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    _check_rtc(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"lamina.cu", 0, None, None), "create")
    encoded = [o.encode() for o in options]
    status = nvrtc.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
    if status:
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise KernelError(f"the kernel does not compile ({' '.join(options)}): {log.value.decode()}")
    size = ctypes.c_size_t()
    _check_rtc(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "size")
    binary = ctypes.create_string_buffer(size.value)
    _check_rtc(nvrtc.nvrtcGetCUBIN(program, binary), "binary")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


def _check_rtc(status: int, what: str) -> None:
    if status:
        raise KernelError(f"NVRTC failed with status {status} ({what})")


def _check(status: int, what: str) -> None:
    if status:
        raise KernelError(f"the CUDA driver failed with status {status} ({what})")
