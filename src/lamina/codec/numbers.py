"""The 16-bit number formats of the codec.

``scale16`` holds a non-negative float32 without its sign bit: 8 exponent bits and 8 mantissa bits. It spans the whole
float32 range, so no engine dtype overflows it, and is twice as fine as bfloat16. Offsets are signed and use bfloat16.
"""

import torch
from torch import Tensor


def to_scale16(x: Tensor) -> Tensor:
    """Round non-negative numbers to ``scale16``.

    Parameters
    ----------
    x : Tensor
        float32 or float64, any shape, non-negative and finite.

    Returns
    -------
    Tensor
        int16 of the same shape: bits 30..15 of the float32, rounded to nearest even.
    """
    bits = x.to(torch.float32).view(torch.int32)
    rounded = bits + 0x3FFF + ((bits >> 15) & 1)
    return (rounded.clamp(0, 0x7F7FFFFF) >> 15).to(torch.int32).to(torch.int16)


def from_scale16(bits: Tensor) -> Tensor:
    """Decode ``scale16`` (int16, any shape) to float32."""
    return ((bits.to(torch.int32) & 0xFFFF) << 15).view(torch.float32)


def round_scale16(x: Tensor) -> Tensor:
    """Round to the nearest ``scale16`` value, as float32."""
    return from_scale16(to_scale16(x))


def round_bf16(x: Tensor) -> Tensor:
    """Round to the nearest bfloat16 value, as float32."""
    return x.to(torch.bfloat16).to(torch.float32)
