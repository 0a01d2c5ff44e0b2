"""Which tokens of a batch are real: read from the attention mask, remembered by column."""

import torch
from torch import Tensor

from lamina.errors import CacheStateError
from lamina.pages import Budget


class Padding:
    """Real tokens and padding of everything a cache has been given.

    Parameters
    ----------
    budget : Budget
        Where the bytes are accounted.

    Attributes
    ----------
    columns : Tensor or None
        bool ``[B, tokens seen]``, False where a row was padded; None while nothing ever was.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._columns: Tensor | None = None

    @property
    def columns(self) -> Tensor | None:
        return self._columns

    @columns.setter
    def columns(self, columns: Tensor | None) -> None:
        before = self.n_bytes
        self._columns = columns
        self.budget.used += self.n_bytes - before

    @property
    def n_bytes(self) -> int:
        """Bytes of the columns."""
        return self._columns.untyped_storage().nbytes() if self._columns is not None else 0

    def growth(self, real: Tensor | None, batch: int, before: int, tokens: int) -> int:
        """Bytes that :meth:`grow` adds."""
        return batch * (before + tokens) - self.n_bytes if real is not None or self.columns is not None else 0

    def step(self, mask: Tensor | None, batch: int, before: int, tokens: int) -> Tensor | None:
        """Real tokens of a chunk, bool ``[B, T]`` on the CPU; None if all are.

        Parameters
        ----------
        mask : Tensor or None
            ``[B or 1, 1, T, before + T]``, boolean (True is seen) or additive (0 is seen).
        batch, before, tokens : int
            Sequences, tokens seen before, and T.

        Raises
        ------
        CacheStateError
            If the mask is anything but causal attention without the padding.
        """
        if mask is None:
            if self.columns is not None:
                raise CacheStateError(
                    "the cache holds padded rows, but this call has no attention_mask; pass the mask of all tokens so "
                    "far, with 0 for padding"
                )
            return None
        if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2:] != (tokens, before + tokens):
            raise CacheStateError(
                f"the attention mask has shape {tuple(mask.shape)}, not [{batch}, 1, {tokens}, {before + tokens}]: a "
                "LaminaCache knows causal attention over all tokens with padding left out, nothing else"
            )
        seen = (mask if mask.dtype == torch.bool else mask == 0)[:, 0].expand(batch, -1, -1)
        old, new = seen[:, :, :before], seen[:, :, before:]
        real = new.diagonal(dim1=1, dim2=2)
        known = self.columns[:, None, :before].to(seen.device) if self.columns is not None else True
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=seen.device).tril()
        as_expected = (old == known).all(-1) & (new == (real[:, None] & causal)).all(-1)
        if not bool((as_expected | ~real).all()):
            raise CacheStateError(
                "the attention mask hides tokens that the cache holds, or is not causal: a LaminaCache knows causal "
                "attention with padding left out, nothing else; padding must be masked from its first call on"
            )
        real = real.cpu()
        return None if bool(real.all()) else real

    def grow(self, real: Tensor | None, batch: int, before: int, tokens: int) -> None:
        """Remember the columns ``before`` to ``before + tokens``, unless another layer did."""
        if real is None and self.columns is None:
            return
        columns = torch.ones(batch, before, dtype=torch.bool) if self.columns is None else self.columns
        if columns.shape[1] == before:
            added = torch.ones(batch, tokens, dtype=torch.bool) if real is None else real
            self.columns = torch.cat([columns, added], 1)

    def lengths(self, batch: int, seen: int) -> list[int]:
        """Real tokens of every row among the first ``seen`` columns."""
        return [seen] * batch if self.columns is None else self.columns[:, :seen].sum(1).tolist()

    def keep(self, columns: Tensor | None) -> None:
        """Replace the columns, forgetting them if nothing is padded."""
        self.columns = None if columns is None or bool(columns.all()) else columns

    def crop(self, seen: int) -> None:
        """Forget all columns from ``seen`` on."""
        self.keep(None if self.columns is None else self.columns[:, :seen].clone())

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order."""
        self.keep(None if self.columns is None else self.columns[rows])
