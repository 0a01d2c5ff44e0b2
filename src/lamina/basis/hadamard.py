"""Flat orthogonal matrices: Hadamard where the order is constructible, a cosine basis elsewhere.

Multiplying by a matrix whose entries all have the same magnitude spreads every direction evenly over the channels,
which is what makes one scale a row good enough (Lamina SPEC 3).
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from lamina.errors import ConfigError


def flat_orthogonal(dim: int) -> Tensor:
    """Orthogonal matrix whose entries are as equal in magnitude as the order allows.

    The order is split into a power of two (Sylvester) and the smallest remaining factor with a Paley construction over
    a prime field. This covers every multiple of 16 up to 256; powers of two are the Sylvester matrix in natural order.
    Orders out of its reach (688 is the first) get the orthonormal DCT-II, whose entries are at most sqrt(2 / dim).

    Parameters
    ----------
    dim
        Head dimension, a positive multiple of 16.

    Returns
    -------
    Tensor
        float64 [dim, dim] on the CPU, the caller's own copy. Row 0 is constant, 1 / sqrt(dim).

    Raises
    ------
    ConfigError
        If `dim` is not a positive multiple of 16.

    Notes
    -----
    Constructions: Sylvester 1867; R. E. A. C. Paley, "On orthogonal matrices", 1933. Lamina SPEC 3.
    """
    _check_dim(dim)
    return _flat_orthogonal(dim).clone()


def bit_reversal(dim: int) -> Tensor:
    """Permutation that reverses the bits of an index; the identity where `dim` is not a power of two.

    Parameters
    ----------
    dim
        Head dimension, a positive multiple of 16.

    Returns
    -------
    Tensor
        int64 [dim] on the CPU. For a power of two, element i is i with its log2(dim) bits in reverse order (its own
        inverse). Other orders have no bit reversal, so their indices stay in place.

    Raises
    ------
    ConfigError
        If `dim` is not a positive multiple of 16.
    """
    _check_dim(dim)
    index = torch.arange(dim)
    if not _is_power_of_two(dim):
        return index
    reverse = torch.zeros_like(index)
    for _ in range(dim.bit_length() - 1):
        reverse = reverse * 2 + index % 2
        index = index // 2
    return reverse


def _check_dim(dim: int) -> None:
    if type(dim) is not int or dim < 16 or dim % 16:
        raise ConfigError(f"head dim {dim!r} is not a positive multiple of 16; Lamina serves 16, 32, 48, ...")


@lru_cache(maxsize=16)
def _flat_orthogonal(dim: int) -> Tensor:
    hadamard = _hadamard(dim)
    if hadamard is None:
        return _cosine_basis(dim)
    return hadamard * hadamard[0] / math.sqrt(dim)  # the signs of row 0 move into the columns


def _hadamard(order: int) -> Tensor | None:
    """Hadamard matrix with entries +-1, the Sylvester factor as large as possible; None if out of reach."""
    if _is_power_of_two(order):
        return _sylvester(order)
    core = order // (order & -order)
    while order % core == 0:
        paley = _paley(core)
        if paley is not None:
            return torch.kron(_sylvester(order // core), paley)
        core *= 2
    return None


def _sylvester(order: int) -> Tensor:
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < order:
        matrix = torch.kron(pair, matrix)
    return matrix


def _paley(order: int) -> Tensor | None:
    """Paley I (order = q + 1, q = 3 mod 4) or II (order = 2q + 2, q = 1 mod 4) for a prime q; None if neither fits."""
    q = order - 1
    if q % 4 == 3 and _is_prime(q):
        return torch.eye(order, dtype=torch.float64) + _bordered_residues(q, left_sign=-1.0)
    q = order // 2 - 1
    if order % 2 == 0 and q % 4 == 1 and _is_prime(q):
        off_diagonal = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        diagonal = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        conference = _bordered_residues(q, left_sign=1.0)
        return torch.kron(conference, off_diagonal) + torch.kron(torch.eye(q + 1, dtype=torch.float64), diagonal)
    return None


def _bordered_residues(q: int, *, left_sign: float) -> Tensor:
    """Conference matrix [q + 1, q + 1]: quadratic characters of i - j, bordered by +1 above and `left_sign` left."""
    index = torch.arange(q)
    character = torch.full((q,), -1.0, dtype=torch.float64)
    character[index**2 % q] = 1.0
    character[0] = 0.0
    matrix = torch.ones(q + 1, q + 1, dtype=torch.float64)
    matrix[1:, 0] = left_sign
    matrix[0, 0] = 0.0
    matrix[1:, 1:] = character[(index[:, None] - index) % q]
    return matrix


def _cosine_basis(dim: int) -> Tensor:
    """Orthonormal DCT-II, frequencies in rows."""
    frequency = torch.arange(dim, dtype=torch.float64)[:, None]
    sample = torch.arange(dim, dtype=torch.float64) + 0.5
    matrix = torch.cos(math.pi / dim * frequency * sample) * math.sqrt(2 / dim)
    matrix[0] = 1 / math.sqrt(dim)
    return matrix


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def _is_prime(n: int) -> bool:
    return n >= 2 and all(n % divisor for divisor in range(2, math.isqrt(n) + 1))
