"""The 16-bit number formats, against frexp arithmetic."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from lamina.codec.numbers import from_scale16, round_bf16, round_scale16, to_scale16

LARGEST = (2 - 2.0**-8) * 2.0**127
positive = st.floats(0, float(np.finfo(np.float32).max), width=32)


def test_every_pattern_decodes_to_its_value_and_back() -> None:
    patterns = torch.arange(0x7F80 * 2, dtype=torch.int32).to(torch.int16)  # all but Inf and NaN
    values = from_scale16(patterns)
    assert np.array_equal(values.double().numpy(), oracle.read_scale16(patterns.numpy()))
    assert torch.equal(to_scale16(values), patterns)
    assert bool((values[1:] > values[:-1]).all())


@given(st.lists(positive, min_size=1, max_size=40))
def test_rounding_is_to_nearest_even(xs: list[float]) -> None:
    rounded = round_scale16(torch.tensor(xs, dtype=torch.float32)).double().numpy()
    assert np.array_equal(rounded, oracle.scale16(np.array(xs)))


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (1 + 2.0**-9, 1.0),  # a tie goes to the even neighbour, down
        (1 + 3 * 2.0**-9, 1 + 2.0**-7),  # and up
        (1 + 2.0**-9 + 2.0**-20, 1 + 2.0**-8),
        (2 - 2.0**-10, 2.0),  # carries into the exponent
        (1e5, 99840.0 + 256.0),  # representable where float16 overflows
        (2.0**-134, 2.0**-134),  # smallest subnormal
        (2.0**-136, 0.0),
        (float(np.finfo(np.float32).max), LARGEST),
        (1e300, LARGEST),
        (0.0, 0.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_borders_of_the_format(x: float, expected: float, dtype: torch.dtype) -> None:
    if x > 1e38 and dtype is torch.float32:
        x = float(np.finfo(np.float32).max)
    assert round_scale16(torch.tensor([x], dtype=dtype)).item() == expected


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40))
def test_bfloat16_is_rounded_to_nearest_even(xs: list[float]) -> None:
    rounded = round_bf16(torch.tensor(xs, dtype=torch.float32))
    assert np.array_equal(rounded.double().numpy(), oracle.bf16(np.array(xs)))
    stored = rounded.to(torch.bfloat16).view(torch.int16).numpy()
    assert np.array_equal(oracle.read_bf16(stored), oracle.bf16(np.array(xs)))
