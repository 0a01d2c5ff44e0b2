"""What all kernels ask of a GPU, and of the rows that they read there."""

import math
from functools import cache

import torch
from torch import Tensor

OLDEST = (8, 0)
"""Compute capability from which on the kernels run."""
MOST_DIM = 256
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LOG2E = math.log2(math.e)


def is_served(device: torch.device) -> bool:
    """Whether a device is a GPU that the kernels run on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST


def objection(device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """Why no kernel can serve rows of ``dim`` numbers of a dtype on a GPU; None if they can."""
    if not is_served(device):
        return "the GPU is no NVIDIA GPU of compute capability 8.0 or newer"
    if dtype not in KINDS:
        return f"rows are {dtype}"
    if dim % 16 or dim > MOST_DIM:
        return f"the head dimension is {dim}; the kernels take multiples of 16 up to {MOST_DIM}"
    return None


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def most_shared(device: torch.device) -> int:
    """Bytes of shared memory that a block may have."""
    # Left out by older versions of torch; what any such GPU has.
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 99 * 1024))


def readable(x: Tensor, n_bytes: int) -> Tensor:
    """Rows ``[..., D]`` that can be read so many bytes at a time; a copy if need be."""
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and not any(n * x.itemsize % n_bytes for n in x.stride()[:-1])
    return x if fits else x.contiguous()
