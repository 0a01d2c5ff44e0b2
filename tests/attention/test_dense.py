"""Pages that become 16-bit rows for long chunks, in Triton's interpreter, against the oracle."""

from itertools import cycle
from types import ModuleType

import pytest
import torch
from test_paths import shed_some
from test_prefill_on_host import check, expected_of
from torch import Tensor

from helpers import generator, layer_profile, make_store, poison, random_rows
from host import needs_compiler, on_host
from lamina.attention.cuda import parts, prefill
from lamina.attention.cuda.parts import Group, group_rows
from lamina.attention.types import AttentionOutput
from lamina.codec import CodecConfig
from lamina.pages import WindowConfig

pytest.importorskip("triton")
pytestmark = [needs_compiler, pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has its own tests")]
TIERS = [(2, 2), (4, 2), (8, 4), (2, 8), (4, 4)]


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from lamina.attention.cuda import dense

    on_host(monkeypatch, prefill)
    for name in ("_expands", "_halves"):
        monkeypatch.setattr(prefill, name, lambda *_: True)
    monkeypatch.setattr(parts, "LONG", 1)
    monkeypatch.setattr(prefill, "FILLED", 0)
    monkeypatch.setattr(dense, "VALUES", torch.float32)
    monkeypatch.setattr(dense, "HALF", dense.tl.float32)
    return dense


def causal(q: Tensor, k: Tensor, v: Tensor, group: Group, scaling: float, out: Tensor) -> Tensor:
    """Attention of chunks, as many tokens each, to themselves; rounded to the dtype of ``out``."""
    n = group.rows.stop - group.rows.start
    q, k, v = (x.unflatten(0, (n, -1)).transpose(1, 2).double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    seen = torch.ones(q.shape[2], q.shape[2]).tril() > 0
    s = (q @ k.mT * scaling).masked_fill(~seen, float("-inf"))
    out.copy_((s.softmax(-1) @ v).transpose(1, 2).flatten(0, 1))
    return s.logsumexp(-1).transpose(0, 1).flatten(1).float()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize(
    ("batch", "heads", "group", "dim", "tokens", "before", "window", "centered"),
    [
        (1, 2, 2, 32, 100, 700, (64, 128, 0), True),
        (2, 1, 3, 16, 70, 333, (64, 64, 64), True),
        (1, 1, 1, 64, 300, 200, (0, 0, 0), False),
        (1, 2, 4, 16, 33, 0, (64, 256, 0), True),
    ],
)
def test_expanded_pages(
    known: bool, cap: float, batch: int, heads: int, group: int, dim: int, tokens: int, before: int,
    window: tuple[int, int, int], centered: bool, monkeypatch: pytest.MonkeyPatch, dense: ModuleType,
) -> None:  # fmt: skip
    """Mixed tiers, pages that lost planes, windows, sequences of different lengths, several pieces, tokens in turns."""
    store, basis = make_store(
        heads, dim, tiers=cycle(TIERS).__next__, window=WindowConfig(*window), dtype=torch.bfloat16,
        codec=CodecConfig(center=centered), profile=layer_profile(heads, dim, 1),
    )  # fmt: skip
    basis.softcap = cap
    if before:
        rows = random_rows(batch, heads, before, dim, 2, torch.bfloat16)
        store.append(*rows, torch.rand(batch, before, generator=generator(3)) < 0.9)
        shed_some(store, 5)
    stored = [s.length for s in store.sequences]
    chunk = random_rows(batch, heads, tokens, dim, 4, torch.bfloat16)
    store.append(*chunk)
    q = torch.randn(batch, heads * group, tokens, dim, generator=generator(5)).bfloat16()
    expected = expected_of(store, basis, q, chunk)
    poison(store)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, *chunk)]
    for pages, most in ((1 << 20, 1 << 20), (2, 80)):
        monkeypatch.setattr(dense, "MOST_NUMBERS", pages * batch * heads * 64 * dim)
        monkeypatch.setattr(parts, "MOST_NUMBERS", most * batch * heads * group * dim)
        groups = group_rows([tokens] * batch, heads * group, dim, q.device, stored if known else None)
        out, lse_packed, lse = prefill.attend_groups(
            flat[0], store.view(), basis, (flat[1], flat[2]), groups, itself=causal
        )
        lse_packed, lse = (x.unflatten(1, (batch, tokens)).transpose(0, 1) for x in (lse_packed, lse))
        got = AttentionOutput(out.unflatten(0, (batch, tokens)), lse_packed, lse)
        check(got, expected, 1e-2)


@pytest.mark.parametrize(("of_q", "of_k"), [(0, 1), (1, 0), (0, 0), (1e-20, 1e-38), (1e4, 1e-38)])
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_rows_and_queries_of_zero(of_q: float, of_k: float, cap: float, dense: ModuleType) -> None:
    store, basis = make_store(1, 32, tiers=(4, 4), window=WindowConfig(0, 0, 0), dtype=torch.bfloat16)
    basis.softcap = cap
    k, v = random_rows(1, 1, 240, 32, 2, torch.bfloat16)
    k = (k.float() * of_k).bfloat16()
    store.append(k[:, :, :200], v[:, :, :200])
    chunk = k[:, :, 200:], v[:, :, 200:]
    store.append(*chunk)
    q = (torch.randn(1, 2, 40, 32, generator=generator(5)) * of_q).bfloat16()
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, *chunk)]
    out, lse_packed, lse = prefill.attend_groups(
        flat[0], store.view(), basis, (flat[1], flat[2]), group_rows([40], 2, 32, q.device), itself=causal
    )
    check(AttentionOutput(out[None], lse_packed[None], lse[None]), expected_of(store, basis, q, chunk), 1e-2)
