"""Hundreds of random operations against an account that keeps every row in float64; nothing diverges, nothing leaks."""

import pytest

from operations import BITS, WEIGHTS, Driver

# Mean squared error of codes relative to the rows' own spread, with a margin over what each tier's codec has.
LIMITS = dict(zip(BITS, (0.25, 0.02, 1e-4), strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_random_operations(seed: int) -> None:
    figures = Driver(seed).run(300)
    assert sum(figures.operations.values()) == 300 and len(figures.operations) >= len(WEIGHTS) - 3
    assert figures.outputs > 3000 and figures.pages > 200
    assert figures.attention_error < 2e-3
    assert all(figures.code_error[bits] < limit for bits, limit in LIMITS.items()), figures.code_error
    assert figures.bytes_start == figures.bytes_end == 0 < figures.bytes_peak
