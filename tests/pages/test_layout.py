"""The record of a page: documented fields in documented order."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina.pages.layout import RecordLayout

layouts = st.builds(
    RecordLayout, st.integers(1, 9), st.sampled_from([16, 64, 80, 96, 112, 128, 192, 256]), st.booleans()
)


@given(layouts, st.integers(1, 3), st.integers(0, 2**31))
def test_fields_lie_in_order_without_gaps(layout: RecordLayout, n: int, seed: int) -> None:
    h, d = layout.n_heads, layout.head_dim
    records = torch.randint(
        0, 256, (n, layout.record_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    views = layout.views(records)
    fields = [(views.base, (2, h, 64, d // 4)), (views.scale, (2, h, 64)), (views.mid, (2, h, 64))]
    fields += [(views.center, (h, d))] if layout.centered else []
    fields += [(views.gain, (2, h, 2))]
    fields += [(views.center_scale, (h,))] if layout.centered else []
    raw = []
    for view, shape in fields:
        assert view is not None and view.shape == (n, *shape)
        raw.append(view.contiguous().view(n, -1).view(torch.uint8).numpy())
    packed = np.concatenate(raw, 1)
    assert np.array_equal(packed, records[:, : packed.shape[1]].numpy())
    assert 0 <= layout.record_bytes - packed.shape[1] < 16 and layout.record_bytes % 16 == 0
    assert (views.center is None) == (views.center_scale is None) == (not layout.centered)


def test_views_write_through_a_slice_of_a_larger_array() -> None:
    layout = RecordLayout(2, 64)
    arena = torch.zeros(5, layout.record_bytes, dtype=torch.uint8)
    views = layout.views(arena[2:4])
    views.scale[1, 0, 1, 63] = 0x0102
    at = layout.scale_offset + 2 * (64 + 63)
    assert arena[3, at : at + 2].tolist() == [2, 1]
    assert int(arena.ne(0).sum()) == 2


@pytest.mark.parametrize(("dim", "bits"), [(128, 2.32), (64, 2.57)])
def test_bits_of_a_tier_2_page_are_what_the_spec_states(dim: int, bits: float) -> None:
    layout = RecordLayout(8, dim)
    assert layout.record_bytes * 8 / (2 * 8 * 64 * dim) == pytest.approx(bits, abs=0.01)
