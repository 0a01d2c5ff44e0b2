"""The page table: what is known of every page of one layer."""

import torch
from torch import Tensor

START, ROWS, TIER, FINE, FINEST, EXACT = 0, 1, 2, 4, 6, 10
COLUMNS = 11
"""int32 columns of a page's row in the table. TIER and FINE have one column a side (K, V), FINEST two.

========  ============================================================================
START     position of the page's first token
ROWS      rows that are valid, up to 64
TIER      bits that the page was encoded at, 0 while it is open
FINE      slot of the fine slab, or -1
FINEST    slots of the two finest slabs, or -1
EXACT     slot of the exact rows, or -1
========  ============================================================================
"""


def new_row(start: int) -> list[int]:
    """Row of a fresh open page whose first token is at position ``start``."""
    row = [-1] * COLUMNS
    row[START], row[ROWS], row[TIER], row[TIER + 1] = start, 0, 0, 0
    return row


def read_bits(table: Tensor, side: int) -> Tensor:
    """Bits that a side of each page is read at, from rows of the page table ``[..., 11]``."""
    return torch.where(table[..., FINEST + 2 * side] >= 0, 8, torch.where(table[..., FINE + side] >= 0, 4, 2))


def shed_costs(table: Tensor, loss: Tensor) -> Tensor:
    """What dropping the least significant plane of every page and side costs, inf without one: ``[..., 2]``.

    Parameters
    ----------
    table : Tensor
        Rows of the page table, ``[..., 11]``.
    loss : Tensor
        float32 ``[..., 2, 2]``: predicted loss of reading K or V at 2 or at 4 bits.
    """
    cost = torch.where(table[..., [FINEST, FINEST + 2]] >= 0, loss[..., 1], loss[..., 0])
    return cost.masked_fill(table[..., FINE : FINE + 2] < 0, float("inf"))
