"""Which pages the sequences of a batch have: a table for the kernels, on the CPU and on the device."""

from collections.abc import Callable

import torch
from torch import Tensor

from lamina.pages.pool import Budget

CAPACITY_STEP = 32
"""Pages by which the device's table grows, which keeps its place while a sequence grows."""

Tell = Callable[[Tensor, Tensor, Tensor], None]
"""Writes rows ``[n, C]`` from the CPU to the rows ``ids`` of a tensor ``[N, C]`` on the device."""


def tell(target: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Write rows to a device now."""
    target[ids.to(target.device)] = rows.to(target.device)


class PageIds:
    """Page ids of a batch, int32 ``[B, P]`` padded with -1.

    Parameters
    ----------
    budget : Budget
        Where the bytes are accounted.
    device : torch.device
        Where kernels read the table.
    mirrored : bool
        Whether that is another memory than the CPU's.
    """

    def __init__(self, budget: Budget, device: torch.device, mirrored: bool) -> None:
        self.budget, self.device, self.mirrored = budget, device, mirrored
        self.n_bytes = 0
        self._ids: Tensor | None = None
        self._there: Tensor | None = None
        self._untold: list[tuple[Tensor, Tensor, Tensor]] = []

    def forget(self) -> None:
        """The sequences have other pages now; the table is made anew when it is read."""
        self._ids = None

    def add(self, rows: list[int], at: list[int], pages: list[int]) -> None:
        """Sequences got a page each, as their ``at``-th; one may be named more than once."""
        if self._ids is None or not rows:
            return
        short = max(at) + 1 - self._ids.shape[1]
        if short > 0:
            self._ids = torch.nn.functional.pad(self._ids, (0, short), value=-1)
        where, added = (torch.tensor(rows), torch.tensor(at)), torch.tensor(pages, dtype=torch.int32)
        self._ids[where] = added
        if self.mirrored:
            self._untold.append((*where, added))

    def growth(self, pages: list[int]) -> int:
        """Bytes that the table grows by if the sequences have so many pages each."""
        return max(0, table_bytes(len(pages), max(pages, default=0), self.mirrored) - self.n_bytes)

    def on_cpu(self, sequences: list[list[int]]) -> Tensor:
        """The table, of sequences with these pages."""
        if self._ids is None:
            width = max((len(pages) for pages in sequences), default=0)
            rows = [pages + [-1] * (width - len(pages)) for pages in sequences]
            self._ids = torch.tensor(rows, dtype=torch.int32).view(len(sequences), width)
            self._there = None
        self._count()
        return self._ids

    def on_device(self, sequences: list[list[int]], tell: Tell = tell, spare: int = 0) -> Tensor:
        """The device's table, int32 ``[B, P]`` with P a multiple of 32; it has room for ``spare`` more pages if new."""
        ids = self.on_cpu(sequences)
        if not self.mirrored:
            return ids
        if self._there is None or self._there.shape[1] < ids.shape[1]:
            width = _capacity(ids.shape[1] + spare)
            padded = torch.nn.functional.pad(ids, (0, width - ids.shape[1]), value=-1)
            with torch.inference_mode(False):
                self._there = padded.to(self.device, copy=True)
        elif self._untold:
            flat, width = self._there.view(-1, 1), self._there.shape[1]
            index = torch.cat([row * width + at for row, at, _ in self._untold])
            tell(flat, index, torch.cat([pages for _, _, pages in self._untold])[:, None])
        self._untold = []
        self._count()
        return self._there

    def _count(self) -> None:
        """Account for the tables from when they are made, the device's as soon as it can be asked for."""
        ids = self._ids
        assert ids is not None
        n_bytes = ids.untyped_storage().nbytes()
        if self.mirrored:
            there = self._there
            width = _capacity(ids.shape[1]) if there is None else max(there.shape[1], _capacity(ids.shape[1]))
            n_bytes += 4 * ids.shape[0] * width
        self.budget.used += n_bytes - self.n_bytes
        self.n_bytes = n_bytes


def table_bytes(batch: int, width: int, mirrored: bool) -> int:
    """Bytes of the table of so many sequences of so many pages."""
    return 4 * batch * (width + (_capacity(width) if mirrored else 0))


def _capacity(width: int) -> int:
    return -(-width // CAPACITY_STEP) * CAPACITY_STEP
