"""Parts that attention of many tokens is done in: rows of a batch, where their results go, and what merges them."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.attention.cuda.tables import to_device

TILE = 64
"""Rows of a block, one a token and query head; as many tokens are taken at once at least."""
MOST_NUMBERS = 1 << 25
"""Numbers of queries, all heads together, up to which tokens are taken at once: bounds scratch memory."""
LONG = 256
"""Tokens of a row from which on its chunk attends to itself by another kernel."""


@dataclass(frozen=True)
class Group:
    """Rows of a batch whose chunks are attended from in one launch.

    Attributes
    ----------
    rows, tokens : slice
        Rows of the batch, and their tokens, which lie behind each other.
    starts : Tensor
        int32 ``[rows + 1]`` on the device: where each row's tokens start, counted from the first row's.
    most : int
        Tokens of a row, at most.
    long : bool
        Whether the rows have many tokens, as many each.
    before : int or None
        Tokens stored before them, at most, of each row; None where nobody knows.
    """

    rows: slice
    tokens: slice
    starts: Tensor
    most: int
    long: bool
    before: int | None

    @property
    def fresh(self) -> bool:
        """Whether no token is stored before them."""
        return self.before == 0


def group_rows(
    counts: list[int], n_heads: int, head_dim: int, device: torch.device, before: list[int] | None = None
) -> list[Group]:
    """Groups of rows with so many query tokens each; scratch memory is bounded unless one row alone is too long.

    Parameters
    ----------
    counts : list of int
        Query tokens of each row.
    n_heads, head_dim : int
        Query heads and head dimension.
    device : torch.device
        Where the queries are.
    before : list of int, optional
        Tokens of each row that are stored before these, at most; rows with none are not mixed with others.
    """
    most = most_tokens(n_heads, head_dim)
    groups: list[Group] = []
    row = token = 0
    while row < len(counts):
        long, end, total = counts[row] >= LONG, row, 0
        while end < len(counts) and (end == row or total + counts[end] <= most):
            alike = counts[end] == counts[row] if long else counts[end] < LONG
            if not alike or (before and (before[end] == 0) != (before[row] == 0)):
                break
            total, end = total + counts[end], end + 1
        starts = torch.tensor([0, *itertools.accumulate(counts[row:end])], dtype=torch.int32)
        at = slice(row, end), slice(token, token + total)
        most_before = max(before[row:end]) if before else None
        groups.append(Group(*at, to_device(starts, device), max(counts[row:end]), long, most_before))
        row, token = end, token + total
    return groups


def most_tokens(n_heads: int, head_dim: int) -> int:
    """Query tokens that are taken at once."""
    return max(TILE, MOST_NUMBERS // (n_heads * head_dim))


@dataclass(frozen=True)
class Attended:
    """Where results go: ``[n, Hq, D]`` in q's dtype, and float32 ``[Hq, n]`` of all rows and of packed ones."""

    out: Tensor
    lse: Tensor
    lse_packed: Tensor

    def of(self, tokens: slice) -> "Attended":
        """Those of some tokens."""
        return Attended(self.out[tokens], self.lse[:, tokens], self.lse_packed[:, tokens])


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge values ``[Hq, n, D]``, in place of the first, by log-sum-exps ``[Hq, n]``, -inf without any."""
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([x for _, x in parts]).logsumexp(0)
    base = lse.clamp(min=torch.finfo(torch.float32).min)
    values = parts[0][0].mul_((parts[0][1] - base).exp()[..., None])
    for more, of in parts[1:]:
        values.addcmul_(more, (of - base).exp()[..., None])
    return values, lse
