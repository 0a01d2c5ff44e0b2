"""Pages that lie beyond 2^31 numbers of their pools; needs an NVIDIA GPU with memory to spare."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_cuda import basis_on_gpu
from test_paths import MIXED, Case, build

import oracle
from helpers import fill, layer_profile, oracle_basis, random_rows, relative_error, stored
from lamina.basis.encoder import PageEncoder
from lamina.codec import CodecConfig
from lamina.pages import Budget, EncodingWriter, LayerStore, WindowConfig
from lamina.pages.table import EXACT, FINE
from lamina.pages.view import StoreView

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 24 * 2**30, reason="there is no large NVIDIA GPU"
)
CASE = Case("large", heads=8, group=4, dim=128, batch=2, tiers=MIXED, window=(64, 64, 0), dtype=torch.bfloat16)


def far(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A pool whose last slots are these, behind more than 2^31 numbers that are never read."""
    away = 2**31 // x.shape[1:].numel() + 1
    pool = torch.empty(away + len(x), *x.shape[1:], dtype=x.dtype, device="cuda")
    pool[away:] = x.cuda()
    return pool, away


def moved(view: StoreView) -> StoreView:
    """The same pages at the far end of their pools."""
    (records, pages), (slabs, by_slabs), (exact, by_exact) = (far(x) for x in (view.records, view.slabs, view.exact))
    table = torch.full((len(records), view.table.shape[1]), -1, dtype=torch.int32)
    table[pages:] = view.table
    for columns, by in ((slice(FINE, EXACT), by_slabs), (slice(EXACT, EXACT + 1), by_exact)):
        cells = table[pages:, columns]
        table[pages:, columns] = torch.where(cells >= 0, cells + by, cells)
    ids = torch.where(view.page_ids >= 0, view.page_ids + pages, view.page_ids)
    return replace(
        view, records=records, slabs=slabs, exact=exact, table=table.cuda(), page_ids=ids.cuda(),
        lengths=view.lengths.cuda(),
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 40])
def test_attention_reads_far_pages(tokens: int) -> None:
    from lamina.attention.cuda.decode import attend_cuda
    from lamina.attention.cuda.prefill import attend_prefill

    store, basis, q, k, v = build(CASE)
    fill(store, k[:, :, :-tokens], v[:, :, :-tokens], chunk=40)
    rows = k[:, :, -tokens:], v[:, :, -tokens:]
    store.append(*rows)
    view, q_now, mine = store.view(), q[:, :, -tokens:].to(CASE.dtype), basis_on_gpu(replace(basis, rows=None))
    exact = tuple(x.double().numpy() for x in rows)
    expected = oracle.attend(
        q_now.double().numpy(), stored(view), oracle_basis(basis), *([exact] if tokens > 1 else [])
    )
    where = moved(view)
    if tokens == 1:
        got = attend_cuda(q_now.cuda(), where, mine)
    else:
        got = attend_prefill(q_now.cuda(), where, mine, (rows[0].cuda(), rows[1].cuda()))
    assert relative_error(got.out.double().cpu().numpy(), expected[0]) < 1e-2
    np.testing.assert_allclose(got.lse.cpu().numpy(), expected[2], atol=1e-2)


def test_pages_are_encoded_far_away() -> None:
    from lamina.attention.cuda.encode import CudaPageWriter

    views = []
    k, v = random_rows(1, 8, 256, 128, dtype=torch.bfloat16)
    for place in ("cpu", "cuda"):
        encoder = PageEncoder(layer_profile(8, 128), CodecConfig(), 128**-0.5, place)
        writer = EncodingWriter(encoder) if place == "cpu" else CudaPageWriter(encoder, torch.bfloat16)
        store = LayerStore(
            8, 128, torch.bfloat16, place, window=WindowConfig(0, 0, 0), writer=writer, tiers=lambda: (8, 4),
            budget=Budget(),
        )  # fmt: skip
        if place == "cuda":
            store.holds_storage = True
            for pool in store.arena.pools:
                pool.reserve(2**31 // pool.data[0].shape[1:].numel() + 20)
                pool.free.reverse()
        store.append(k.to(place), v.to(place))
        records, table = store.arena.pages.data[0], store.arena.table
        ids = store.page_ids()[0].long()
        assert place == "cpu" or int(ids.min()) * records.shape[1] > 2**31
        slots = table[ids, FINE:EXACT].long()
        views.append((records[ids.to(place)].cpu(), store.arena.slabs.data[0][slots[slots >= 0].to(place)].cpu()))
    for theirs, mine in zip(*views):
        assert float((theirs != mine).float().mean()) < 0.01
