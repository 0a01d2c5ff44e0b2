"""The CUDA kernels against the oracle, on the cases of the other paths; needs an NVIDIA GPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_paths import CASES, Case, build, shed_some

import oracle
from helpers import oracle_basis, relative_error, stored
from lamina.attention.types import ReadBasis
from lamina.engines.hf import LaminaCache, cache_kwarg
from lamina.pages import WindowConfig
from lamina.pages.view import StoreView
from tiny_models import build as build_model
from tiny_models import logits_of, profile_of, tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")

COLUMNS = 16
SERVED = [case for case in CASES if case.dim <= 256 and case.group <= COLUMNS]


def on_gpu(view: StoreView) -> StoreView:
    names = ("records", "slabs", "exact", "table", "page_ids", "lengths")
    return replace(view, **{name: getattr(view, name).cuda() for name in names})


def basis_on_gpu(basis: ReadBasis) -> ReadBasis:
    names = ("q_forward", "v_back", "mean_v", "kappa")
    sinks = None if basis.sinks is None else basis.sinks.cuda()
    return replace(basis, sinks=sinks, **{name: getattr(basis, name).cuda().contiguous() for name in names})


@pytest.mark.parametrize("case", SERVED, ids=lambda c: c.id)
@pytest.mark.parametrize("splits", [None, 3])
def test_decode_at_every_position(case: Case, splits: int | None) -> None:
    from lamina.attention.cuda.decode import attend_cuda

    store, basis, q, k, v = build(case)
    theirs, mine = oracle_basis(basis), basis_on_gpu(basis)
    most = COLUMNS // case.group
    at, call, worst = 0, 0, [0.0] * 4
    while at < case.tokens:
        n = min((8, 8, 7, 1, 8, 5)[call % 6], case.tokens - at, most)
        store.append(k[:, :, at : at + n], v[:, :, at : at + n])
        if call % 9 == 8:
            shed_some(store, case.shed)
        view, q_now = store.view(), q[:, :, at : at + n].to(case.dtype)
        out, lse_packed, lse, spread = oracle.attend(q_now.float().numpy(), stored(view), theirs)
        where = on_gpu(view)
        got = attend_cuda(q_now.cuda(), where, mine, splits=splits).with_sinks(mine.sinks)
        assert got.spread is not None
        if call % 5 == 0:
            plain = attend_cuda(q_now.cuda(), where, replace(mine, rows=None), splits=splits).with_sinks(mine.sinks)
            assert plain.spread is None and torch.allclose(plain.out.float(), got.out.float(), atol=1e-5)
        packed = got.lse_packed.cpu().numpy()
        assert np.array_equal(np.isfinite(packed), np.isfinite(lse_packed)), f"at {at}"
        finite = np.isfinite(lse_packed)
        errors = (
            relative_error(got.out.double().cpu().numpy(), out),
            float(np.abs(got.lse.cpu().numpy() - lse).max()),
            float(np.abs(packed - lse_packed)[finite].max()) if finite.any() else 0.0,
            float(np.abs(got.spread.cpu().numpy() - spread).max() / max(spread.max(), 1e-9)),
        )
        worst = [max(a, b) for a, b in zip(worst, errors)]
        at, call = at + n, call + 1
    tolerance = 1e-2 if case.dtype == torch.bfloat16 else 5e-3
    assert max(worst) < tolerance, "queries and weights are rounded to 16 bits, and results to the engine's dtype"


def test_a_cache_on_the_gpu_decodes_with_the_kernels(caplog: pytest.LogCaptureFixture) -> None:
    """A whole model, token by token, against the same model and cache on the CPU."""
    model, ids = build_model("Llama"), tokens(2, 420)
    logits = []
    for device in ("cpu", "cuda"):
        model.to(device)
        cache = LaminaCache(model, profile_of("Llama"), tiers=(8, 8), window=WindowConfig(64, 64, 64))
        steps = [logits_of(model, ids[:, :400].to(device), **cache_kwarg(model, cache))[:, -1:]]
        steps += [logits_of(model, ids[:, t : t + 1].to(device), **cache_kwarg(model, cache)) for t in range(400, 420)]
        logits.append(torch.cat(steps, 1).cpu())
    model.to("cpu")
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=2e-2)
    assert "plain torch" not in caplog.text
