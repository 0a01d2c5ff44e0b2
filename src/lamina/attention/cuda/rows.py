"""Rows of a step's tokens into pages on NVIDIA GPUs: launches the kernel of ``rows.cu``."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from lamina.attention.cuda.encode import JOB_WORDS
from lamina.attention.cuda.gpu import KINDS
from lamina.attention.cuda.nvrtc import Module
from lamina.pages.view import StoreView

THREADS = 128


class _Rows(ctypes.Structure):
    _fields_ = (("k", ctypes.c_void_p), ("v", ctypes.c_void_p), ("strides", ctypes.c_longlong * 4))


@cache
def _module(dim: int, heads: int, record_bytes: int, dtype: torch.dtype, device: torch.device) -> Module:
    defines = {
        "D": dim, "HKV": heads, "CENTERED": 1, "RECORD_BYTES": record_bytes, "KIND": KINDS[dtype],
        "ROW_SIZE": dtype.itemsize, "JOB_WORDS": JOB_WORDS,
    }  # fmt: skip
    return Module("rows", defines, device)


def write_rows(k: Tensor, v: Tensor, slots: Tensor, view: StoreView, jobs: Tensor, damaged: Tensor) -> None:
    """Write rows to the pages that have exact rows, and tell jobs where their pages' rows are.

    Parameters
    ----------
    k, v : Tensor
        ``[n, H, D]`` on a GPU, rows contiguous.
    slots : Tensor
        int64 ``[n]``: 64 page + row of each token, negative for none.
    view : StoreView
        The layer's pages.
    jobs : Tensor
        int64 ``[m, JOB_WORDS]`` on the GPU, of :meth:`CudaPageWriter.jobs`, those without an address of rows being of
        pages that lie whole among these tokens.
    damaged : Tensor
        int32 ``[1]``: counts numbers that are NaN or Inf.
    """
    n, heads, dim = k.shape
    if n == 0:
        return
    strides = (ctypes.c_longlong * 4)(*k.stride()[:2], *v.stride()[:2])
    _module(dim, heads, view.layout.record_bytes, k.dtype, k.device).launch(
        "lamina_rows", (n, heads, 1), THREADS, _Rows(k.data_ptr(), v.data_ptr(), strides), slots, view.table,
        view.exact, view.records, jobs, len(jobs), damaged,
    )  # fmt: skip
