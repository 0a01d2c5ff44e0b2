"""Witness rows: exact rows of a few closed pages, which stand for a sequence's packed tokens (Lamina SPEC 6).

Which pages have one, and which row it is, depends on the page's position alone: every page of the first 2k tokens,
every 8th up to 8k, every 32nd up to 32k, and so on. A row is kept as long as its page, whatever planes are shed.
"""

from dataclasses import dataclass

from torch import Tensor

from lamina.codec import PAGE_TOKENS

DENSE_PAGES = 32


@dataclass
class WitnessRows:
    """Witness rows of one sequence.

    Attributes
    ----------
    ids : Tensor
        int64 ``[n]``: their pages.
    k, v : Tensor
        ``[H, n, D]`` in the engine's dtype.
    weight : Tensor
        float32 ``[n]``: tokens that each stands for.
    """

    ids: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor


def stride(page: int) -> int:
    """One page in so many has a witness, around the ``page``-th page of a sequence."""
    step, limit = 1, DENSE_PAGES
    while page >= limit:
        step, limit = (8 if step == 1 else 4 * step), 4 * limit
    return step


def witness_row(start: int) -> int | None:
    """Row that a page starting at token ``start`` keeps, or None."""
    page = start // PAGE_TOKENS
    step = stride(page)
    return (37 * page + 11) % PAGE_TOKENS if page % step == step // 2 else None


def tokens_for(start: int) -> int:
    """Tokens that the witness of a page starting at token ``start`` stands for."""
    return PAGE_TOKENS * stride(start // PAGE_TOKENS)
