"""Bit planes: the documented byte layout, bit by bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from lamina.codec.packing import SLABS, join_planes, split_planes

dims = st.sampled_from([16, 64, 80, 112, 256])
BITS = (2, 4, 8)


@given(bits=st.sampled_from(BITS), dim=dims, rows=st.integers(1, 5), seed=st.integers(0, 2**31))
def test_slabs_equal_the_documented_layout(bits: int, dim: int, rows: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, dim), dtype=np.uint8)
    slabs = split_planes(torch.from_numpy(codes), bits)
    assert len(slabs) == sum(list(SLABS.values())[: BITS.index(bits) + 1])
    for ours, expected in zip(slabs, oracle.pack(codes, bits), strict=True):
        assert ours.dtype == torch.uint8
        assert np.array_equal(ours.numpy(), expected)
    assert np.array_equal(join_planes(slabs).numpy(), codes)
    assert np.array_equal(oracle.unpack([s.numpy() for s in slabs]), codes)


@pytest.mark.parametrize(("bits", "read"), [(8, 4), (8, 2), (4, 2)])
def test_dropping_slabs_leaves_the_top_bits(bits: int, read: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 7, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    kept = split_planes(codes, bits)[: {2: 1, 4: 2}[read]]
    assert torch.equal(join_planes(kept), codes >> (bits - read))


def test_one_channel_at_a_time() -> None:
    """Channel 5 of 16 is (p=1, i=1): bits 2-3 of byte 1 of base and fine, the low nibble of finest slab 1."""
    codes = torch.zeros(16, dtype=torch.uint8)
    codes[5] = 0b10_01_1110
    base, fine, finest0, finest1 = split_planes(codes, 8)
    assert base.tolist() == [0, 0b10 << 2, 0, 0]
    assert fine.tolist() == [0, 0b01 << 2, 0, 0]
    assert finest0.tolist() == [0, 0, 0, 0]
    assert finest1.tolist() == [0, 0b1110, 0, 0]
