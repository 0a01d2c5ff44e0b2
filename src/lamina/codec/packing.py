"""Bit planes: unsigned codes split by significance and packed so that a kernel needs no shuffles.

Every plane of one page, head and KV side is a stack of *slabs* of shape ``[64 tokens, D/4 bytes]``. Let ``i`` run over
``0 .. D/4 - 1`` and ``p`` over ``0 .. 3``; channel ``p * D/4 + i`` is called (p, i).

========  ======================================================================================================
plane     which byte holds what
========  ======================================================================================================
base      1 slab. Byte ``i`` holds the two most significant bits of channels (0, i), (1, i), (2, i), (3, i) at bit
          positions 0-1, 2-3, 4-5, 6-7.
fine      1 slab, laid out like base: the next two bits of an 8- or 4-bit code.
finest    2 slabs: the last four bits of an 8-bit code. Slab 0 holds channel (0, i) in the low and (2, i) in the high
          nibble of byte ``i``; slab 1 holds (1, i) and (3, i).
========  ======================================================================================================

So ``(byte >> 2p) & 3`` over a row is a contiguous slice of channels: one dot product per bit position against the
matching quarter of q (and one quarter of o per bit position for V). All slabs are equally large: one arena slot.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

SLABS = {"base": 1, "fine": 1, "finest": 2}
SLABS_OF_BITS = {2: 1, 4: 2, 8: 4}
"""Slabs, most significant first, that hold codes of so many bits."""


def slabs_beyond_base(bits: Iterable[int]) -> int:
    """Slabs of K's and V's codes, or of those of many layers, besides their base slabs."""
    return sum(SLABS_OF_BITS[b] - 1 for b in bits)


def pack_pairs(codes: Tensor) -> Tensor:
    """Pack 2-bit codes: uint8 ``[..., D]`` with values 0..3 -> uint8 ``[..., D/4]``."""
    c0, c1, c2, c3 = codes.chunk(4, dim=-1)
    return c0 | (c1 << 2) | (c2 << 4) | (c3 << 6)


def unpack_pairs(packed: Tensor) -> Tensor:
    """Inverse of :func:`pack_pairs`: uint8 ``[..., D/4]`` -> uint8 ``[..., D]``."""
    return torch.cat([packed & 3, (packed >> 2) & 3, (packed >> 4) & 3, packed >> 6], dim=-1)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack 4-bit codes: uint8 ``[..., D]`` with values 0..15 -> uint8 ``[2, ..., D/4]`` (two slabs)."""
    c0, c1, c2, c3 = codes.chunk(4, dim=-1)
    return torch.stack([c0 | (c2 << 4), c1 | (c3 << 4)])


def unpack_nibbles(slabs: Tensor) -> Tensor:
    """Inverse of :func:`pack_nibbles`: uint8 ``[2, ..., D/4]`` -> uint8 ``[..., D]``."""
    low, high = slabs & 15, slabs >> 4
    return torch.cat([low[0], low[1], high[0], high[1]], dim=-1)


def split_planes(codes: Tensor, bits: int) -> list[Tensor]:
    """Split codes of one tier into packed slabs, most significant first.

    Parameters
    ----------
    codes : Tensor
        uint8 ``[..., D]``, values below ``2**bits``; D a multiple of 4.
    bits : int
        2, 4 or 8.

    Returns
    -------
    list of Tensor
        1 (base), 2 (base, fine) or 4 (base, fine, finest 0, finest 1) slabs, uint8 ``[..., D/4]``.
    """
    slabs = [pack_pairs(codes >> (bits - 2))]
    if bits >= 4:
        slabs.append(pack_pairs((codes >> (bits - 4)) & 3))
    if bits == 8:
        slabs.extend(pack_nibbles(codes & 15))
    return slabs


def join_planes(slabs: list[Tensor]) -> Tensor:
    """Codes made of the 1, 2 or 4 most significant slabs: uint8 ``[..., D]`` of 2, 4 or 8 bits."""
    codes = unpack_pairs(slabs[0])
    if len(slabs) >= 2:
        codes = (codes << 2) | unpack_pairs(slabs[1])
    if len(slabs) == 4:
        codes = (codes << 4) | unpack_nibbles(torch.stack(slabs[2:]))
    return codes
