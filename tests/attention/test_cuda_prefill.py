"""The CUDA kernels for many query tokens against the oracle, on the cases of the other paths; needs an NVIDIA GPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_cuda import basis_on_gpu, on_gpu
from test_paths import CASES, MIXED, Case, build, shed_some

import oracle
from helpers import fill, oracle_basis, poison, relative_error, stored
from lamina.attention.blocked import attend_blocked
from lamina.attention.types import ReadBasis
from lamina.pages.view import StoreView

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")

SERVED = [case for case in CASES if case.dim <= 256]
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
Rows = tuple[torch.Tensor, torch.Tensor]


def worst_error(
    q: torch.Tensor, view: StoreView, basis: ReadBasis, rows: Rows, expected: tuple[np.ndarray, ...],
    splits: int | None = None,
) -> float:  # fmt: skip
    """Of the output and the log-sum-exps."""
    from lamina.attention.cuda.prefill import attend_prefill

    got = attend_prefill(q.cuda(), view, basis, (rows[0].cuda(), rows[1].cuda()), splits).with_sinks(basis.sinks)
    out, lse_packed, lse, _ = expected
    packed, finite = got.lse_packed.cpu().numpy(), np.isfinite(lse_packed)
    assert np.array_equal(np.isfinite(packed), finite)
    return max(
        relative_error(got.out.double().cpu().numpy(), out),
        float(np.abs(got.lse.cpu().numpy() - lse).max()),
        float(np.abs(packed - lse_packed)[finite].max(initial=0)),
    )


@pytest.mark.parametrize("case", SERVED, ids=lambda c: c.id)
@pytest.mark.parametrize("chunk", [9, 64, 129, 300])
def test_prefill_at_every_position(case: Case, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from lamina.attention.cuda import parts

    store, basis, q, k, v = build(case)
    mine, worst = basis_on_gpu(replace(basis, rows=None)), 0.0
    for call, at in enumerate(range(0, case.tokens, chunk)):
        end = min(case.tokens, at + chunk)
        rows = k[:, :, at:end], v[:, :, at:end]
        store.append(*rows)
        shed_some(store, case.shed)
        if chunk == 9 and call % 5:
            continue
        view, q_now = store.view(), q[:, :, at:end].to(case.dtype)
        exact = tuple(x.double().numpy() for x in rows)
        expected = oracle.attend(q_now.double().numpy(), stored(view), oracle_basis(basis), exact)
        # A few tokens at a time, and all of them.
        few = 70 * case.batch * case.group * case.heads * case.dim
        monkeypatch.setattr(parts, "MOST_NUMBERS", few if call % 2 else 1 << 25)
        for splits in (None, 3):
            worst = max(worst, worst_error(q_now, on_gpu(view), mine, rows, expected, splits))
    assert worst < TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", SERVED, ids=lambda c: c.id)
def test_expanded_pages(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages as 16-bit rows, some at a time and all at once."""
    from lamina.attention.cuda import dense, parts, prefill

    pytest.importorskip("triton")
    if case.dim & (case.dim - 1):
        pytest.skip("such heads are read as codes")
    monkeypatch.setattr(parts, "LONG", 1)
    monkeypatch.setattr(prefill, "FILLED", 0)
    case = replace(case, dtype=torch.bfloat16)
    store, basis, q, k, v = build(case)
    mine, worst = basis_on_gpu(replace(basis, rows=None)), 0.0
    for call, at in enumerate(range(0, case.tokens, 100)):
        end = min(case.tokens, at + 100)
        rows = k[:, :, at:end], v[:, :, at:end]
        store.append(*rows)
        shed_some(store, case.shed)
        view, q_now = store.view(), q[:, :, at:end].bfloat16()
        expected = oracle.attend(
            q_now.double().numpy(), stored(view), oracle_basis(basis), tuple(x.double().numpy() for x in rows)
        )
        few = 2 * case.batch * case.heads * 64 * case.dim
        monkeypatch.setattr(dense, "MOST_NUMBERS", few if call % 2 else 1 << 25)
        worst = max(worst, worst_error(q_now, on_gpu(view), mine, rows, expected))
    assert worst < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_chunk_is_attended_alike_by_torch_and_by_the_kernel(dtype: torch.dtype) -> None:
    """A cap so high that it does nothing keeps the chunk away from torch."""
    from lamina.attention.cuda.prefill import attend_prefill

    case = Case("own", heads=2, group=4, dim=128, dtype=dtype, tiers=MIXED, tokens=900, window=(64, 128, 0))
    store, basis, q, k, v = build(case)
    fill(store, k, v, chunk=300)
    rows = k[:, :, 500:].cuda(), v[:, :, 500:].cuda()
    mine, view = basis_on_gpu(replace(basis, rows=None)), on_gpu(store.view())
    q_now = q[:, :, 500:].to(dtype).cuda()
    plain, capped = (attend_prefill(q_now, view, replace(mine, softcap=cap), rows) for cap in (0.0, 1e4))
    blocked = attend_blocked(q_now, replace(view, table=view.table.cpu(), page_ids=view.page_ids.cpu()), mine, rows)
    for got in (plain, capped):
        error = relative_error(got.out.double().cpu().numpy(), blocked.out.double().cpu().numpy())
        assert error < 2 * TOLERANCE[dtype]
        torch.testing.assert_close(got.lse, blocked.lse, rtol=0, atol=TOLERANCE[dtype])


def test_undefined_memory_never_matters() -> None:
    case = Case("poison", tiers=MIXED, tokens=64 * 6 + 90, batch=2, dtype=torch.bfloat16)
    store, basis, q, k, v = build(case)
    fill(store, k[:, :, :-70], v[:, :, :-70])
    rows = k[:, :, -70:], v[:, :, -70:]
    store.append(*rows)
    q_now = q[:, :, -70:].to(case.dtype)
    exact = tuple(x.double().numpy() for x in rows)
    expected = oracle.attend(q_now.double().numpy(), stored(store.view()), oracle_basis(basis), exact)
    poison(store)
    mine = basis_on_gpu(replace(basis, rows=None))
    assert worst_error(q_now, on_gpu(store.view()), mine, rows, expected) < TOLERANCE[case.dtype]


def test_no_value_is_waited_for() -> None:
    from lamina.attention.cuda.prefill import attend_prefill

    case = Case("sync", heads=2, dim=64, dtype=torch.bfloat16, tiers=MIXED, tokens=500)
    store, basis, q, k, v = build(case)
    fill(store, k, v, chunk=100)
    rows = k[:, :, 400:].cuda(), v[:, :, 400:].cuda()
    mine, view, q_now = (
        basis_on_gpu(replace(basis, rows=None)),
        on_gpu(store.view()),
        q[:, :, 400:].to(case.dtype).cuda(),
    )
    attend_prefill(q_now, view, mine, rows)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend_prefill(q_now, view, mine, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
