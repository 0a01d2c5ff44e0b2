"""Changes of page tables on NVIDIA GPUs, gathered and made by the kernel of ``tables.cu``."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from lamina.attention.cuda.nvrtc import Module

THREADS = 32


@cache
def _module(device: torch.device) -> Module:
    return Module("tables", {}, device)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy that does not wait for what the GPU has still to do."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class Patches:
    """Rows to be written to tables on a device, a :data:`lamina.pages.ids.Tell` that waits for :meth:`flush`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._patches: list[Tensor] = []
        self._values: list[Tensor] = []
        self._n = 0

    def __call__(self, target: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Have int32 rows ``[n, C]`` written to the rows ``ids`` of a contiguous tensor ``[N, C]``."""
        n, columns = rows.shape
        patch = torch.empty(n, 2, dtype=torch.int64)
        patch[:, 0] = target.data_ptr() + ids * (columns * target.itemsize)
        patch[:, 1] = torch.arange(n) * columns + self._n + (columns << 32)
        self._patches.append(patch)
        self._values.append(rows.flatten())
        self._n += rows.numel()

    def flush(self) -> None:
        """Write them."""
        if self._patches:
            patches, values = (to_device(torch.cat(x), self.device) for x in (self._patches, self._values))
            _module(self.device).launch("lamina_patch", (len(patches), 1, 1), THREADS, patches, values)
        self._patches, self._values, self._n = [], [], 0


def fill_page_ids(blocks: Tensor, seq_lens: Tensor, page_ids: Tensor, lengths: Tensor) -> None:
    """Take page ids and lengths of a batch from an engine's block table, in one launch.

    Parameters
    ----------
    blocks : Tensor
        int32 ``[B, at least P]`` on a GPU, rows contiguous: what is behind a row's last page does not matter.
    seq_lens : Tensor
        int32 ``[B]``.
    page_ids, lengths : Tensor
        int32 ``[B, P]``, contiguous, and ``[B]``: are written; -1 behind the last page.
    """
    batch, width = page_ids.shape
    _module(blocks.device).launch(
        "lamina_page_ids", (batch, 1, 1), 8 * THREADS, blocks, ctypes.c_longlong(blocks.stride(0)), seq_lens, width,
        page_ids, lengths,
    )  # fmt: skip
