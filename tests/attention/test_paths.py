"""Every attention path against the oracle, which decodes the store's own bytes; every position of a sequence."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from helpers import (
    fill,
    generator,
    layer_profile,
    make_store,
    oracle_basis,
    poison,
    random_rows,
    relative_error,
    stored,
)
from lamina.attention.blocked import attend_blocked
from lamina.attention.cpu import attend_cpu
from lamina.attention.reference import attend_reference
from lamina.attention.types import AttentionOutput, ReadBasis
from lamina.codec import CodecConfig
from lamina.codec.gaussian import gaussian_rows
from lamina.pages import LayerStore, WindowConfig

TIERS = (2, 4, 8)
TOLERANCE = {"reference": 1e-6, "cpu": 2e-3, "blocked": 2e-3}
MIXED = tuple((k, v) for k in TIERS for v in TIERS)


@dataclass
class Case:
    """One row of the matrix."""

    id: str
    heads: int = 2
    group: int = 2
    dim: int = 64
    batch: int = 1
    tiers: tuple[tuple[int, int], ...] = ((2, 2),)
    window: tuple[int, int, int] = (64, 64, 0)
    dtype: torch.dtype = torch.float32
    codec: CodecConfig = field(default_factory=CodecConfig)
    shed: int = 0
    tokens: int = 400
    softcap: float = 0.0
    sinks: bool = False


CASES = [
    *(Case(f"k{k}v{v}", tiers=((k, v),), dim=16 + 16 * (i % 4), group=1 + i) for i, (k, v) in enumerate(MIXED)),
    Case("mixed-batch", batch=3, heads=1, group=3, tiers=MIXED, dim=16),
    Case("mixed-shed", heads=3, group=1, dim=80, tiers=((8, 8), (4, 8), (8, 4), (4, 4)), shed=7),
    Case("all-shed", dim=16, group=5, tiers=((8, 8),), shed=99),
    Case("wide", heads=1, group=9, dim=256, tiers=((4, 2),)),
    Case("no-windows", window=(0, 0, 0), tiers=MIXED, dim=48),
    Case("long-windows", window=(128, 128, 64), tiers=MIXED, dim=32, tokens=520),
    Case("bf16", dtype=torch.bfloat16, batch=2, tiers=MIXED),
    Case("fp16", dtype=torch.float16, tiers=MIXED, dim=96),
    Case("uncentred", codec=CodecConfig(center=False), tiers=MIXED, dim=112),
    Case("clip", codec=CodecConfig(rule="clip"), tiers=MIXED),  # type: ignore[arg-type]
    Case("softcap", tiers=MIXED, softcap=3.0, group=3),
    Case("sinks", tiers=MIXED, sinks=True, batch=2),
    Case("softcap-and-sinks", tiers=MIXED, softcap=2.0, sinks=True, heads=1, group=8, dim=80),
    Case("head-dim-512", tiers=((2, 4), (8, 2)), heads=1, dim=512, group=1),
    Case("no-mass-correction", codec=CodecConfig(mass_correction=False), tiers=((2, 2),), dim=128),
]
matrix = pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)


def build(case: Case) -> tuple[LayerStore, ReadBasis, Tensor, Tensor, Tensor]:
    """Store, basis and the rows of a whole sequence; tiers change from call to call."""
    calls = iter(range(10**6))
    store, basis = make_store(
        case.heads,
        case.dim,
        tiers=lambda: case.tiers[next(calls) // 3 % len(case.tiers)],
        window=WindowConfig(*case.window),
        dtype=case.dtype,
        codec=case.codec,
        profile=layer_profile(case.heads, case.dim, seed=len(case.id)),
    )
    k, v = random_rows(case.batch, case.heads, case.tokens, case.dim, seed=1, dtype=case.dtype)
    sinks = torch.randn(case.heads * case.group, generator=generator(5)) + 4 if case.sinks else None
    basis = replace(basis, softcap=case.softcap, sinks=sinks, rows=gaussian_rows(case.codec, case.dim))
    q = torch.randn(case.batch, case.heads * case.group, case.tokens, case.dim, generator=generator(2))
    return store, basis, q.to(case.dtype).float() * 1.5, k, v


def shed_some(store: LayerStore, n: int) -> None:
    """Drop planes here and there, not in any sensible order."""
    for i in range(n):
        found = store.arena.shed_candidates()
        if found:
            _, _, page, side = found[(7 * i) % len(found)]
            store.arena.shed(page, side)


def check(result: AttentionOutput, expected: tuple[np.ndarray, ...], tolerance: float) -> None:
    out, lse_packed, lse, spread = expected
    assert relative_error(result.out.double().numpy(), out) < tolerance
    np.testing.assert_allclose(result.lse.numpy(), lse, rtol=0, atol=max(tolerance, 1e-5))
    np.testing.assert_allclose(result.lse_packed.numpy(), lse_packed, rtol=0, atol=max(tolerance, 1e-5))
    assert result.spread is not None
    np.testing.assert_allclose(result.spread.numpy(), spread, rtol=2 * tolerance, atol=tolerance * spread.max() + 1e-12)


@matrix
def test_decode_at_every_position(case: Case) -> None:
    """Calls of 1 to 8 tokens: the compiled path, and now and then the reference and the blocked path."""
    store, basis, q, k, v = build(case)
    theirs = oracle_basis(basis)
    at, call, packed_rows = 0, 0, 0
    while at < case.tokens:
        n = min((8, 8, 7, 1, 8, 5)[call % 6], case.tokens - at)
        store.append(k[:, :, at : at + n], v[:, :, at : at + n])
        if call % 9 == 8:
            shed_some(store, case.shed)
        view, q_now = store.view(), q[:, :, at : at + n]
        expected = oracle.attend(q_now.numpy(), stored(view), theirs)
        check(attend_cpu(q_now, view, basis).with_sinks(basis.sinks), expected, TOLERANCE["cpu"])
        packed_rows += int(np.isfinite(expected[1]).sum())
        if call % 7 == 0:
            check(attend_reference(q_now, view, basis), expected, TOLERANCE["reference"])
            chunk = (k[:, :, at : at + n], v[:, :, at : at + n])
            expected = oracle.attend(q_now.numpy(), stored(view), theirs, tuple(x.double().numpy() for x in chunk))
            check(attend_blocked(q_now, view, basis, chunk).with_sinks(basis.sinks), expected, TOLERANCE["blocked"])
        at, call = at + n, call + 1
    assert packed_rows > 100


@matrix
@pytest.mark.parametrize("chunk", [64, 129, 300])
def test_prefill_at_every_position(case: Case, chunk: int) -> None:
    """Chunks attend to themselves exactly and to older rows as they are stored."""
    store, basis, q, k, v = build(case)
    for at in range(0, case.tokens, chunk):
        end = min(case.tokens, at + chunk)
        rows = k[:, :, at:end], v[:, :, at:end]
        store.append(*rows)
        shed_some(store, case.shed)
        view, q_now = store.view(), q[:, :, at:end]
        expected = oracle.attend(
            q_now.numpy(), stored(view), oracle_basis(basis), tuple(x.double().numpy() for x in rows)
        )
        check(attend_blocked(q_now, view, basis, rows).with_sinks(basis.sinks), expected, TOLERANCE["blocked"])


@pytest.fixture
def two_threads() -> Iterator[None]:
    if os.cpu_count() == 1:
        pytest.skip("this machine has one core")
    torch.set_num_threads(2)
    numba.set_num_threads(2)
    yield
    torch.set_num_threads(1)
    numba.set_num_threads(1)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_pages_split_over_threads(tokens: int) -> None:
    """Few items and many pages: each thread takes a share of the pages, exact and packed ones in any split."""
    store, basis, q, k, v = build(Case("threads", heads=1, dim=16, tiers=MIXED, tokens=1500, window=(64, 128, 0)))
    fill(store, k, v, chunk=128)
    q_now = q[:, :, -tokens:]
    expected = oracle.attend(q_now.numpy(), stored(store.view()), oracle_basis(basis))
    check(attend_cpu(q_now, store.view(), basis), expected, TOLERANCE["cpu"])


@pytest.mark.parametrize(("before", "chunk"), [(1300, 200), (100, 1300), (1088, 64)])
def test_long_prefixes_and_chunks_are_taken_in_blocks(before: int, chunk: int) -> None:
    case = Case("long", heads=1, dim=16, tiers=MIXED, tokens=before + chunk, window=(64, 128, 0))
    store, basis, q, k, v = build(case)
    fill(store, k[:, :, :before], v[:, :, :before], chunk=64)
    rows = k[:, :, before:], v[:, :, before:]
    store.append(*rows)
    q_now = q[:, :, before:]
    expected = oracle.attend(
        q_now.numpy(), stored(store.view()), oracle_basis(basis), tuple(x.double().numpy() for x in rows)
    )
    check(attend_blocked(q_now, store.view(), basis, rows), expected, TOLERANCE["blocked"])


def test_the_reference_takes_chunks_too() -> None:
    store, basis, q, k, v = build(Case("chunked", tiers=MIXED, tokens=230))
    fill(store, k[:, :, :170], v[:, :, :170])
    rows = k[:, :, 170:], v[:, :, 170:]
    store.append(*rows)
    q_now = q[:, :, 170:]
    expected = oracle.attend(
        q_now.numpy(), stored(store.view()), oracle_basis(basis), tuple(x.double().numpy() for x in rows)
    )
    check(attend_reference(q_now, store.view(), basis, rows), expected, TOLERANCE["reference"])


Path = Callable[..., AttentionOutput]
every_path = pytest.mark.parametrize(
    "path",
    [
        pytest.param(lambda q, view, basis, chunk: attend_reference(q, view, basis), id="reference"),
        pytest.param(lambda q, view, basis, chunk: attend_cpu(q, view, basis), id="cpu"),
        pytest.param(attend_blocked, id="blocked"),
    ],
)


@every_path
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_keeps_the_engines_dtype(path: Path, dtype: torch.dtype) -> None:
    store, basis = make_store(2, 64, tiers=(4, 2), window=WindowConfig(0, 64, 0), dtype=dtype)
    k, v = random_rows(2, 2, 333, 64, dtype=dtype)
    fill(store, k, v)
    q = torch.randn(2, 4, 4, 64, generator=generator(3)).to(dtype)
    result = path(q, store.view(), basis, (k[:, :, -4:], v[:, :, -4:]))
    assert result.out.dtype == dtype and result.out.shape == (2, 4, 4, 64)
    assert result.lse.dtype == result.lse_packed.dtype == torch.float32
    expected, _, _, _ = oracle.attend(q.double().numpy(), stored(store.view()), oracle_basis(basis))
    assert relative_error(result.out.double().numpy(), expected) < {torch.bfloat16: 6e-3, torch.float16: 2e-3}[dtype]


@every_path
def test_logits_far_from_zero_do_not_overflow(path: Path) -> None:
    """Logits of +-1000: a softmax without its maximum, or a merge that mixes maxima, gives NaN or the wrong side."""
    result, (out, lse_packed, lse, _) = far_from_zero(path)
    assert np.ptp(lse - lse_packed) > 50
    assert relative_error(result.out.double().numpy(), out) < 2e-3
    np.testing.assert_allclose(result.lse.numpy(), lse, rtol=1e-5)
    np.testing.assert_allclose((result.lse_packed - result.lse).exp().numpy(), np.exp(lse_packed - lse), atol=2e-3)


@every_path
def test_the_packed_log_sum_exp_survives_a_negligible_mass(path: Path) -> None:
    result, (_, lse_packed, _, _) = far_from_zero(path)
    np.testing.assert_allclose(result.lse_packed.numpy(), lse_packed, rtol=1e-5)


def far_from_zero(path: Path) -> tuple[AttentionOutput, tuple[np.ndarray, ...]]:
    """Result and oracle where exact and packed parts lie thousands of units apart."""
    plain = layer_profile(1, 32, plain=True)
    store, basis = make_store(1, 32, tiers=(8, 8), window=WindowConfig(64, 64, 0), profile=plain)
    k, v = random_rows(1, 1, 400, 32)
    fill(store, 30 * k, v)
    q = 60 * torch.randn(1, 3, 2, 32, generator=generator(4))
    expected = oracle.attend(q.double().numpy(), stored(store.view()), oracle_basis(basis))
    return path(q, store.view(), basis, (30 * k[:, :, -2:], v[:, :, -2:])), expected


@every_path
@pytest.mark.parametrize("tokens", [3, 70])
def test_undefined_memory_never_matters(path: Path, tokens: int) -> None:
    """Rows that were never written, free slots, records of open pages and padding may hold anything, NaN included."""
    store, basis = make_store(2, 32, tiers=(4, 8), window=WindowConfig(64, 64, 0))
    k, v = random_rows(2, 2, 64 * 6 + 20 + tokens, 32)
    fill(store, k[:, :, :-tokens], v[:, :, :-tokens])
    store.append(k[:, :, -tokens:], v[:, :, -tokens:])
    q = torch.randn(2, 4, tokens, 32, generator=generator(4))
    chunk = k[:, :, -tokens:], v[:, :, -tokens:]
    expected = oracle.attend(q.double().numpy(), stored(store.view()), oracle_basis(basis))
    poison(store)
    result = path(q, store.view(), basis, chunk)
    assert bool(torch.isfinite(result.out).all())
    assert relative_error(result.out.double().numpy(), expected[0]) < 2e-3
