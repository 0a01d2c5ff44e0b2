"""Flat orthogonal matrices and the bit-reversal permutation."""

import math

import pytest
import torch

from lamina.basis.hadamard import bit_reversal, flat_orthogonal
from lamina.errors import ConfigError

WITHOUT_HADAMARD = 688  # the smallest multiple of 16 that no Sylvester x Paley product over prime fields reaches


@pytest.mark.parametrize("dim", range(16, 257, 16))
def test_multiples_of_16_are_hadamard_with_a_constant_first_row(dim: int) -> None:
    matrix = flat_orthogonal(dim)
    assert matrix.shape == (dim, dim)
    assert matrix.dtype == torch.float64
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64), atol=1e-13, rtol=0)
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, dim**-0.5), atol=0, rtol=1e-15)
    assert (matrix[0] > 0).all()


@pytest.mark.parametrize("dim", [16, 64, 128, 256])
def test_powers_of_two_are_sylvester_in_natural_order(dim: int) -> None:
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)]
    expected = torch.tensor(signs, dtype=torch.float64) / math.sqrt(dim)
    assert torch.equal(flat_orthogonal(dim), expected)


@pytest.mark.parametrize(("dim", "core"), [(80, 20), (96, 12), (112, 28), (176, 44), (208, 104), (240, 60)])
def test_the_sylvester_factor_is_as_large_as_possible(dim: int, core: int) -> None:
    blocks = flat_orthogonal(dim).reshape(dim // core, core, dim // core, core).permute(0, 2, 1, 3)
    outer = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(dim // core)] for i in range(dim // core)])
    expected = outer[:, :, None, None] * blocks[0, 0]
    assert torch.equal(blocks, expected)


def test_orders_without_a_construction_get_the_cosine_basis() -> None:
    dim = WITHOUT_HADAMARD
    matrix = flat_orthogonal(dim)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64), atol=1e-12, rtol=0)
    assert matrix.abs().max() <= math.sqrt(2 / dim)
    assert torch.equal(matrix[0], torch.full((dim,), 1 / math.sqrt(dim), dtype=torch.float64))
    for frequency, sample in [(1, 0), (1, dim - 1), (3, 17), (dim - 1, 5)]:
        expected = math.sqrt(2 / dim) * math.cos(math.pi * frequency * (2 * sample + 1) / (2 * dim))
        assert matrix[frequency, sample].item() == pytest.approx(expected, abs=1e-14)


def test_callers_cannot_change_the_cached_matrix() -> None:
    flat_orthogonal(32).zero_()
    assert flat_orthogonal(32)[0, 0].item() == 1 / math.sqrt(32)


def test_bit_reversal_reverses_bits() -> None:
    assert bit_reversal(16).tolist() == [0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15]
    permutation = bit_reversal(128)
    assert permutation.dtype == torch.int64
    assert permutation.tolist() == [int(f"{i:07b}"[::-1], 2) for i in range(128)]


@pytest.mark.parametrize("dim", [48, 80, 96, 192])
def test_bit_reversal_is_the_identity_elsewhere(dim: int) -> None:
    permutation = bit_reversal(dim)
    assert permutation.dtype == torch.int64
    assert permutation.tolist() == list(range(dim))


@pytest.mark.parametrize("function", [flat_orthogonal, bit_reversal])
@pytest.mark.parametrize("dim", [0, -16, 1, 8, 72, 100, 64.0, True])
def test_other_dims_are_refused_by_name(function, dim) -> None:
    with pytest.raises(ConfigError, match=rf"head dim {dim!r} .*multiple of 16"):
        function(dim)
