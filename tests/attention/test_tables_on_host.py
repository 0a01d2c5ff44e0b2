"""The kernels that write tables, run on the CPU."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import generator
from host import needs_compiler, on_host
from lamina.attention.cuda import tables
from lamina.attention.cuda.tables import Patches, fill_page_ids

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def kernels_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host(monkeypatch, tables)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(0, 64 * 9), min_size=1, max_size=6), spare=st.integers(0, 3))
def test_page_ids_end_with_a_sequence(lengths: list[int], spare: int) -> None:
    """Behind it an engine's table holds what it happens to hold."""
    width, n = 9, len(lengths)
    blocks = torch.randint(0, 99, (n + 2, width + spare), dtype=torch.int32, generator=generator(n))
    page_ids, found = torch.full((n + 1, width), 7, dtype=torch.int32), torch.full((n + 1,), 7, dtype=torch.int32)
    fill_page_ids(blocks, torch.tensor([*lengths, 640], dtype=torch.int32), page_ids[:n], found[:n])
    assert found.tolist() == [*lengths, 7] and page_ids[n].tolist() == [7] * width
    for b, length in enumerate(lengths):
        pages = -(-length // 64)
        assert page_ids[b].tolist() == blocks[b, :pages].tolist() + [-1] * (width - pages)


def test_patches_reach_their_rows_alone() -> None:
    first, second = torch.zeros(5, 3, dtype=torch.int32), torch.zeros(4, 1, dtype=torch.int32)
    patches = Patches(first.device)
    patches(first, torch.tensor([4, 1]), torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32))
    patches(second, torch.tensor([2]), torch.tensor([[9]], dtype=torch.int32))
    patches.flush()
    patches.flush()
    assert first.tolist() == [[0, 0, 0], [4, 5, 6], [0, 0, 0], [0, 0, 0], [1, 2, 3]] and second.T.tolist() == [
        [0, 0, 9, 0]
    ]
