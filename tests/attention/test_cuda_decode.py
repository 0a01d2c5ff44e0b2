"""The CUDA kernels, run on the CPU and on a GPU where there is one, against the oracle: given cases and random ones."""

from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_cuda import basis_on_gpu, on_gpu
from test_paths import CASES, Case, build, shed_some
from torch import Tensor

import oracle
from helpers import (
    EXACT,
    ROWS,
    TIER,
    generator,
    layer_profile,
    make_store,
    oracle_basis,
    poison,
    random_rows,
    relative_error,
    stored,
)
from host import needs_compiler, needs_gpu, on_host
from lamina.attention.cuda import decode
from lamina.attention.cuda.decode import attend_cuda
from lamina.attention.cuda.gpu import MOST_DIM
from lamina.attention.types import AttentionOutput, ReadBasis
from lamina.codec import PAGE_TOKENS, CodecConfig
from lamina.codec.gaussian import gaussian_rows
from lamina.pages import StoreView, WindowConfig

pytestmark = needs_compiler

COLUMNS = 16
SERVED = [case for case in CASES if case.dim <= MOST_DIM and case.group <= COLUMNS]
LENGTHS = (7, 64, 65, 131, 200, 259, 330, 399, 400)
PLAIN = ("wide", "bf16", "softcap", "mixed-shed")
TIERS = [(k, v) for k in (2, 4, 8) for v in (2, 4, 8)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        on_host(monkeypatch, decode)
    return request.param


def attend_on(
    device: str, q: Tensor, view: StoreView, basis: ReadBasis, splits: int | None, apart: bool = False
) -> AttentionOutput:
    """What the kernels say, with exact pages in blocks of their own or with packed ones."""
    if device == "cuda":
        q, view, basis = q.cuda(), on_gpu(view), basis_on_gpu(basis)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "processors", lambda device: 1000 if apart else 1)
        found = attend_cuda(q, view, basis, splits=splits).with_sinks(basis.sinks)
    return AttentionOutput(**{name: x if x is None else x.cpu() for name, x in vars(found).items()})


def errors(got: AttentionOutput, expected: tuple[np.ndarray, ...]) -> list[float]:
    """Of the output, relative; of the log-sum-exps; of each part of the spread, relative to its maximum."""
    out, lse_packed, lse, spread = expected
    packed, finite = got.lse_packed.numpy(), np.isfinite(lse_packed)
    assert np.array_equal(np.isfinite(packed), finite)
    found = [
        relative_error(got.out.double().numpy(), out),
        float(np.abs(got.lse.numpy() - lse).max()),
        float(np.abs(packed[finite] - lse_packed[finite]).max(initial=0)),
    ]
    if got.spread is not None:
        parts = np.abs(got.spread.numpy() - spread).max((0, 1, 2)) / np.maximum(spread.max((0, 1, 2)), 1e-9)
        found += parts.tolist()
    return found


@pytest.mark.parametrize("case", SERVED, ids=lambda c: c.id)
def test_decode(device: str, case: Case) -> None:
    """As many query tokens as the kernels take, while the sequences grow."""
    store, basis, q, k, v = build(case)
    theirs, most = oracle_basis(basis), min(8, COLUMNS // case.group)
    at, splits = 0, cycle((2, None, 3, 1))
    for call, end in enumerate((*LENGTHS, case.tokens) if case.tokens > LENGTHS[-1] else LENGTHS):
        store.append(k[:, :, at:end], v[:, :, at:end])
        if call == 5:
            shed_some(store, case.shed)
        view, q_now = replace(store.view(), cut=call % 2 == 0), q[:, :, max(0, end - most) : end].to(case.dtype)
        expected = oracle.attend(q_now.float().numpy(), stored(view), theirs)
        got = attend_on(device, q_now, view, basis, next(splits), apart=call % 3 == 1)
        worst = max(errors(got, expected))
        assert worst < (1e-2 if case.dtype == torch.bfloat16 else 5e-3), f"{worst} after {end} tokens"
        at = end
    if case.id in PLAIN:
        plain = attend_on(device, q_now, view, replace(basis, rows=None), 3)
        assert plain.spread is None
        # A GPU's compiler may contract other operations of the other kernel, which moves a result's last bit.
        same = {"rtol": 1e-2, "atol": 1e-2} if case.dtype == torch.bfloat16 else {"rtol": 0, "atol": 1e-5}
        torch.testing.assert_close(plain.out, got.out, **same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [144, 160, 192, 208])
def test_head_dimensions_between_powers_of_two(device: str, dim: int, dtype: torch.dtype) -> None:
    """A lane has three or four pairs of channels, so that fewer rows of V fit its registers."""
    store, basis = make_store(1, dim, tiers=lambda: (2, 2), window=WindowConfig(64, 64, 0), dtype=dtype)
    store.append(*random_rows(1, 1, 300, dim, 1, dtype))
    view, q = store.view(), torch.randn(1, 2, 1, dim, generator=generator(1)).to(dtype)
    expected = oracle.attend(q.double().numpy(), stored(view), oracle_basis(basis))
    poison(store)
    assert max(errors(attend_on(device, q, view, basis, 2), expected)) < 1e-3


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("window", [(2560, 0), (64, 2560), (1280, 1280)])
def test_wide_windows_with_gaps(device: str, window: tuple[int, int], apart: bool) -> None:
    """More exact pages than are looked up at a time, some of which were shed."""
    store, basis = make_store(1, 16, tiers=lambda: (2, 2), window=WindowConfig(*window))
    store.append(*random_rows(1, 1, 3000, 16, 1, torch.float32))
    pages = store.sequences[0].pages
    for at in (1, 15, 16, 31, -16, -17, -33):
        if store.view().table[pages[at], EXACT] >= 0:
            store.shed_exact(pages[at])
    view, q = store.view(), torch.randn(1, 2, 2, 16, generator=generator(1))
    expected = oracle.attend(q.double().numpy(), stored(view), oracle_basis(basis))
    poison(store)
    assert max(errors(attend_on(device, q, view, basis, 4, apart), expected)) < 1e-3


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for, but for the tiles, which follow from the query tokens."""

    dim: int
    heads: int
    group: int
    tokens: tuple[int, int]
    dtype: torch.dtype = torch.float32
    centered: bool = True
    capped: bool = False
    measured: bool = True


KINDS = [
    Kind(16, 2, 1, (5, 8)),
    Kind(32, 1, 2, (7, 8), torch.float16, capped=True),
    Kind(48, 1, 3, (3, 4), centered=False, capped=True, measured=False),
    Kind(48, 2, 1, (1, 4), torch.float16),
    Kind(16, 1, 4, (1, 1), torch.float16, centered=False),
    Kind(32, 3, 5, (1, 1), measured=False),
]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_decode_of_random_sequences(device: str, kind: Kind, data: st.DataObject) -> None:
    """Sequences of different lengths, grown in pieces and cropped; undefined memory holds NaN."""
    tokens = data.draw(st.integers(*kind.tokens), "query tokens")
    batch = data.draw(st.integers(1, 3), "batch")
    windows = [(0, 0, 0), (64, 0, 0), (0, 64, 0), (64, 64, 64), (0, 192, 0), (192, 1280, 64)]
    window = data.draw(st.sampled_from(windows), "window")
    tiers = data.draw(st.lists(st.sampled_from(TIERS), min_size=1, max_size=6), "tiers")
    codec = CodecConfig(center=kind.centered)
    seed = data.draw(st.integers(0, 99), "seed")
    store, basis = make_store(
        kind.heads, kind.dim, tiers=cycle(tiers).__next__, window=WindowConfig(*window), dtype=kind.dtype, codec=codec,
        profile=layer_profile(kind.heads, kind.dim, seed),
    )  # fmt: skip
    rows = gaussian_rows(codec, kind.dim) if kind.measured else None
    basis = replace(basis, softcap=3.0 if kind.capped else 0.0, rows=rows)
    g = generator(seed)

    def append(n: int, share: float = 1.0) -> None:
        k, v = random_rows(batch, kind.heads, n, kind.dim, int(torch.randint(9999, (), generator=g)), kind.dtype)
        store.append(k, v, torch.rand(batch, n, generator=g) < share)

    for _ in range(data.draw(st.integers(2, 3), "pieces")):
        append(data.draw(st.integers(30, 250), "rows"), 0.9)
        if data.draw(st.booleans(), "crop"):
            kept = data.draw(st.lists(st.floats(0.3, 1), min_size=batch, max_size=batch), "kept")
            store.crop([int(sequence.length * share) for sequence, share in zip(store.sequences, kept)])
        if data.draw(st.booleans(), "shed"):
            shed_some(store, 5)
    if store.sequences[0].pages and data.draw(st.booleans(), "a page closes among the query tokens"):
        last = store.view().table[store.sequences[0].pages[-1]]
        rows_there = int(last[ROWS]) if last[TIER] == 0 else 0
        append((PAGE_TOKENS - rows_there - data.draw(st.integers(0, tokens), "after so many")) % PAGE_TOKENS)
    append(tokens)
    n_q = kind.heads * kind.group
    layout = data.draw(st.permutations(range(3)), "order of q's dimensions")
    q = torch.randn(*((batch, n_q, tokens)[i] for i in layout), kind.dim + 16, generator=generator(seed))
    q = q.to(kind.dtype)[..., 8:-8].permute(*(layout.index(i) for i in range(3)), 3)
    view = store.view()
    expected = oracle.attend(q.double().numpy(), stored(view), oracle_basis(basis))
    poison(store)
    got = attend_on(device, q, view, basis, data.draw(st.integers(1, 5), "splits"), data.draw(st.booleans(), "apart"))
    assert got.out.dtype == kind.dtype and (got.spread is None) == (not kind.measured)
    assert max(errors(got, expected)) < 1e-3
