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
    # The interpreter's products of bfloat16 are wrong.
    monkeypatch.setitem(dense.VALUES, torch.bfloat16, torch.float32)
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
@pytest.mark.parametrize(("dtype", "cap"), [(torch.bfloat16, 0.0), (torch.float16, 0.0), (torch.bfloat16, 3.0)])
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
    known: bool, dtype: torch.dtype, cap: float, batch: int, heads: int, group: int, dim: int, tokens: int, before: int,
    window: tuple[int, int, int], centered: bool, monkeypatch: pytest.MonkeyPatch, dense: ModuleType,
) -> None:  # fmt: skip
    """Mixed tiers, pages that lost planes, windows, sequences of different lengths, several pieces, tokens in turns."""
    store, basis = make_store(
        heads, dim, tiers=cycle(TIERS).__next__, window=WindowConfig(*window), dtype=dtype,
        codec=CodecConfig(center=centered), profile=layer_profile(heads, dim, 1),
    )  # fmt: skip
    basis.softcap = cap
    if before:
        rows = random_rows(batch, heads, before, dim, 2, dtype)
        store.append(*rows, torch.rand(batch, before, generator=generator(3)) < 0.9)
        shed_some(store, 5)
    stored = [s.length for s in store.sequences]
    chunk = random_rows(batch, heads, tokens, dim, 4, dtype)
    store.append(*chunk)
    q = torch.randn(batch, heads * group, tokens, dim, generator=generator(5)).to(dtype)
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
        check(got, expected, 1e-2 if dtype == torch.bfloat16 else 3e-3)
