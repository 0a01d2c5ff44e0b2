"""The kernels for many query tokens, run on the CPU, against the oracle: cases of the other paths, and random ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_paths import CASES, Case, build, far_from_zero, shed_some
from torch import Tensor

import oracle
from helpers import generator, layer_profile, make_store, oracle_basis, poison, random_rows, relative_error, stored
from host import needs_compiler, on_host
from lamina.attention.cuda import parts, prefill
from lamina.attention.cuda.gpu import MOST_DIM
from lamina.attention.cuda.prefill import attend_prefill
from lamina.attention.types import AttentionOutput, ReadBasis
from lamina.codec import CodecConfig
from lamina.pages import LayerStore, WindowConfig

pytestmark = needs_compiler
SERVED = [case for case in CASES if case.dim <= MOST_DIM]
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
TIERS = [(k, v) for k in (2, 4, 8) for v in (2, 4, 8)]


@pytest.fixture(autouse=True)
def kernels_on_the_host() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        on_host(patch, prefill)
        yield


def expected_of(store: LayerStore, basis: ReadBasis, q: Tensor, chunk: tuple[Tensor, Tensor]) -> tuple[np.ndarray, ...]:
    exact = tuple(x.double().numpy() for x in chunk)
    return oracle.attend(q.double().numpy(), stored(store.view()), oracle_basis(basis), exact)


def check(got: AttentionOutput, expected: tuple[np.ndarray, ...], tolerance: float) -> None:
    out, lse_packed, lse, _ = expected
    assert relative_error(got.out.double().numpy(), out) < tolerance
    np.testing.assert_allclose(got.lse.numpy(), lse, rtol=0, atol=tolerance)
    np.testing.assert_allclose(got.lse_packed.numpy(), lse_packed, rtol=0, atol=tolerance)
    assert got.spread is None


@pytest.mark.parametrize("long", [1, 40, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_any_length_attend_together_as_each_alone(
    dtype: torch.dtype, long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several groups, rows of one token, equal ones, and one that is more than a group takes."""
    counts, before = [1, 30, 30, 7, 64, 64, 100], [300, 0, 0, 64, 200, 1, 500]
    stores, fed = [], []
    basis = None
    for i, (n, first) in enumerate(zip(counts, before)):
        store, basis = make_store(2, 32, dtype=dtype, tiers=(4, 2), window=WindowConfig(64, 64, 0))
        k, v = (x.to(dtype) for x in random_rows(1, 2, first + n, 32, seed=i))
        if first:
            store.append(k[:, :, :first], v[:, :, :first])
        store.append(k[:, :, first:], v[:, :, first:])
        stores.append(store)
        fed.append((k[0, :, first:], v[0, :, first:]))
    assert basis is not None
    together, *others = stores
    for store in others:
        together.extend(store)
    view = together.view()
    q = torch.randn(sum(counts), 6, 32, generator=generator(3)).to(dtype)
    k, v = (torch.cat([pair[side].transpose(0, 1) for pair in fed]) for side in (0, 1))
    monkeypatch.setattr(parts, "LONG", long)
    monkeypatch.setattr(parts, "MOST_NUMBERS", 96 * 6 * 32)
    groups = prefill.group_rows(counts, 6, 32, q.device, before)
    assert [x for g in groups for x in range(g.rows.start, g.rows.stop)] == list(range(len(counts)))
    assert len(groups) < len(counts) and [g.rows for g in groups if g.fresh] == [slice(1, 3)]
    got = prefill.attend_groups(q, view, basis, (k, v), groups)
    at = 0
    for b, n in enumerate(counts):
        own = slice(at, at + n)
        chunk = k[own].transpose(0, 1)[None], v[own].transpose(0, 1)[None]
        alone = attend_prefill(q[own].transpose(0, 1)[None], view.only(b), basis, chunk)
        torch.testing.assert_close(got[0][own], alone.out[0], rtol=0, atol=TOLERANCE[dtype])
        for mine, other in ((got[1][:, own], alone.lse_packed[0]), (got[2][:, own], alone.lse[0])):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-3)
        at += n


@pytest.mark.parametrize("case", SERVED, ids=lambda c: c.id)
@pytest.mark.parametrize("chunk", [64, 129])
def test_chunks(case: Case, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks attend to themselves exactly and to older rows as they are stored."""
    store, basis, q, k, v = build(case)
    # Shares of the pages, and some tokens at a time.
    splits, numbers = cycle((1, None, 3)), cycle((70 * case.batch * case.group * case.heads * case.dim, 1 << 25))
    for i, at in enumerate(range(0, case.tokens, chunk)):
        end = min(case.tokens, at + chunk)
        rows = k[:, :, at:end], v[:, :, at:end]
        store.append(*rows)
        shed_some(store, case.shed)
        if chunk == 64 and i % 3:
            continue
        q_now = q[:, :, at:end].to(case.dtype)
        expected = expected_of(store, basis, q_now, rows)
        monkeypatch.setattr(parts, "MOST_NUMBERS", next(numbers))
        got = attend_prefill(q_now, store.view(), basis, rows, splits=next(splits)).with_sinks(basis.sinks)
        assert got.out.dtype == case.dtype
        check(got, expected, TOLERANCE[case.dtype])


def test_logits_far_from_zero() -> None:
    """Exact and packed parts lie thousands of units apart."""
    got, (out, lse_packed, lse, _) = far_from_zero(attend_prefill)
    assert relative_error(got.out.double().numpy(), out) < 2e-3
    np.testing.assert_allclose(got.lse.numpy(), lse, rtol=3e-5)
    np.testing.assert_allclose(got.lse_packed.numpy(), lse_packed, rtol=1e-5)


def test_queries_of_zero_weigh_all_rows_alike() -> None:
    store, basis = make_store(1, 16, tiers=(4, 4), window=WindowConfig(64, 0, 0))
    k, v = random_rows(1, 1, 300, 16)
    store.append(k, v)
    q = torch.zeros(1, 2, 20, 16)
    chunk = k[:, :, -20:], v[:, :, -20:]
    check(attend_prefill(q, store.view(), basis, chunk), expected_of(store, basis, q, chunk), 2e-3)


@dataclass(frozen=True)
class Kind:
    """What the kernels are compiled for."""

    dim: int
    heads: int
    group: int
    dtype: torch.dtype = torch.float32
    centered: bool = True
    capped: bool = False


KINDS = [
    Kind(16, 2, 1, torch.bfloat16),
    Kind(32, 1, 3, torch.float16, capped=True),
    Kind(48, 1, 2, centered=False),
    Kind(16, 1, 5, capped=True),
    Kind(64, 2, 2, torch.bfloat16),
]


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_random_sequences(kind: Kind, data: st.DataObject) -> None:
    """Sequences of different lengths, grown in pieces and cropped; undefined memory holds NaN."""
    tokens = data.draw(st.integers(1, 150), "query tokens")
    batch = data.draw(st.integers(1, 2), "batch")
    window = data.draw(st.sampled_from([(0, 0, 0), (64, 0, 0), (0, 64, 0), (64, 64, 64), (64, 192, 0)]), "window")
    tiers = data.draw(st.lists(st.sampled_from(TIERS), min_size=1, max_size=6), "tiers")
    seed = data.draw(st.integers(0, 99), "seed")
    store, basis = make_store(
        kind.heads, kind.dim, tiers=cycle(tiers).__next__, window=WindowConfig(*window), dtype=kind.dtype,
        codec=CodecConfig(center=kind.centered), profile=layer_profile(kind.heads, kind.dim, seed),
    )  # fmt: skip
    basis.softcap = 3.0 if kind.capped else 0.0
    pieces = data.draw(st.lists(st.integers(1, 200), max_size=4), "pieces")
    crop = data.draw(st.integers(0, max(0, len(pieces) - 1)), "crop after")
    for i, piece in enumerate(pieces):
        rows = random_rows(batch, kind.heads, piece, kind.dim, seed + i, kind.dtype)
        store.append(*rows, torch.rand(batch, piece, generator=generator(seed + i)) < 0.9)
        if i == crop and crop:
            shares = data.draw(st.lists(st.floats(0.3, 1), min_size=batch, max_size=batch), "kept")
            store.crop([int(s.length * share) for s, share in zip(store.sequences, shares)])
        if data.draw(st.booleans(), "shed"):
            shed_some(store, 5)
    wide = random_rows(batch, kind.heads, tokens, kind.dim + 8, seed + 9, kind.dtype)
    # Views as models make them: heads beside each other in a row, or off any boundary.
    beside, off = data.draw(st.booleans(), "heads side by side"), data.draw(st.sampled_from([0, 1, 4]), "off")
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) if beside else x for x in wide)
    chunk = k[..., off : off + kind.dim], v[..., off : off + kind.dim]
    store.append(*chunk)
    layout = data.draw(st.permutations(range(3)), "order of q's dimensions")
    q = torch.randn(
        *((batch, kind.heads * kind.group, tokens)[i] for i in layout), kind.dim + 8, generator=generator(seed)
    )
    q = q.to(kind.dtype)[..., off : off + kind.dim].permute(*(layout.index(i) for i in range(3)), 3)
    expected = expected_of(store, basis, q, chunk)
    poison(store)
    got = attend_prefill(q, store.view(), basis, chunk, splits=data.draw(st.sampled_from([None, 1, 2, 3]), "splits"))
    check(got, expected, TOLERANCE[kind.dtype])
