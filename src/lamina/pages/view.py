"""What attention is given of one layer."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lamina.pages.config import WindowConfig
from lamina.pages.layout import RecordLayout


@dataclass
class StoreView:
    """What attention reads of one layer. Tensors are the storage itself.

    Attributes
    ----------
    layout : RecordLayout
        Fields of ``records``.
    records : Tensor
        uint8 ``[N, record_bytes]``.
    slabs : Tensor
        uint8 ``[M, H, 64, D/4]``: fine and finest slabs.
    exact : Tensor
        ``[E, 2, H, 64, D]`` in the engine's dtype.
    table : Tensor
        int32 ``[N, 11]``, see :mod:`lamina.pages.table`.
    page_ids : Tensor
        int32 ``[B, P]``, padded with -1.
    lengths : Tensor
        int32 ``[B]``, tokens stored.
    window : WindowConfig
        Exact windows.
    cut : bool
        Whether a sequence may have more pages than its tokens fill, as where rows were cropped.
    """

    layout: RecordLayout
    records: Tensor
    slabs: Tensor
    exact: Tensor
    table: Tensor
    page_ids: Tensor
    lengths: Tensor
    window: WindowConfig
    cut: bool = True

    def to(self, device: torch.device) -> "StoreView":
        """The view with its tables on a device, copied unless they are there."""
        return replace(
            self, table=self.table.to(device), page_ids=self.page_ids.to(device), lengths=self.lengths.to(device)
        )

    def only(self, sequence: int) -> "StoreView":
        """The view of one sequence alone."""
        return self.rows(slice(sequence, sequence + 1))

    def rows(self, at: slice) -> "StoreView":
        """The view of some sequences."""
        return replace(self, page_ids=self.page_ids[at], lengths=self.lengths[at])
