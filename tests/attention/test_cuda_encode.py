"""The kernel that encodes pages, run on the CPU and on a GPU where there is one, against the encoder in torch."""

from itertools import cycle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import generator, layer_profile, random_rows
from host import needs_compiler, needs_gpu, on_host
from lamina.attention.cuda import encode
from lamina.attention.cuda.encode import CudaPageWriter
from lamina.basis.encoder import PageEncoder
from lamina.codec import CodecConfig
from lamina.codec.numbers import from_scale16
from lamina.codec.packing import SLABS_OF_BITS, join_planes
from lamina.codec.page import decode_center, decode_pages
from lamina.pages import Budget, EncodingWriter, LayerStore, WindowConfig
from lamina.pages.table import FINE, FINEST, TIER

pytestmark = needs_compiler
WINDOW = WindowConfig(64, 64, 0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request, monkeypatch):
    if request.param == "cpu":
        on_host(monkeypatch, encode)
        monkeypatch.setattr(encode, "most_shared", lambda device: 227 * 1024)
    return request.param


def stores(heads, dim, codec, dtype, tiers, device):
    """A store that the torch encoder writes and one that the kernel writes."""
    for place, writer in (("cpu", EncodingWriter), (device, lambda encoder: CudaPageWriter(encoder, dtype))):
        encoder = PageEncoder(layer_profile(heads, dim), codec, dim**-0.5, place)
        yield LayerStore(
            heads, dim, dtype, place, window=WINDOW, writer=writer(encoder), tiers=cycle(tiers).__next__,
            budget=Budget(), centered=codec.center,
        )  # fmt: skip


def append(stores, k, v):
    for store in stores:
        store.append(k.to(store.device), v.to(store.device))


def decoded(store, page, side):
    """Codes, scales, midpoints, gains and rows of a closed page, with its center."""
    layout, arena = store.layout, store.arena
    records = layout.views(arena.pages.data[0].cpu())
    bits = arena.cell(page, TIER + side)
    columns = [FINE + side, FINEST + 2 * side, FINEST + 2 * side + 1][: SLABS_OF_BITS[bits] - 1]
    slabs = [records.base[page, side], *(arena.slabs.data[0][arena.cell(page, c)].cpu() for c in columns)]
    numbers = [x[page, side][None] for x in (records.scale, records.mid, records.gain)]
    by_read = [decode_pages([s[None] for s in slabs[:n]], *numbers, bits)[0] for n in (1, 2, 4) if n <= len(slabs)]
    center = torch.zeros(layout.n_heads, layout.head_dim)
    if side == 0 and records.center is not None:
        center = decode_center(records.center[page], records.center_scale[page])
    return join_planes(slabs), from_scale16(numbers[0][0]), numbers[1][0].float(), from_scale16(numbers[2][0]), [
        rows + center[:, None] for rows in by_read
    ]  # fmt: skip


def compare(mine, theirs, rows, side):
    """The kernel's pages against the encoder's: all but the same codes, and no more error at any number of bits."""
    encoder = theirs.writer.encoder
    differing = codes = 0
    for b, sequence in enumerate(theirs.sequences):
        assert mine.sequences[b].pages == sequence.pages
        for at, page in enumerate(sequence.pages):
            if theirs.arena.cell(page, TIER) == 0:
                continue
            x = rows[b, :, 64 * at : 64 * at + 64].float()
            exact = (x if side == 0 else x - encoder.mean_v[:, None]) @ (encoder.k_forward, encoder.v_forward)[side]
            got, want = decoded(mine, page, side), decoded(theirs, page, side)
            differing += int((got[0] != want[0]).sum())
            codes += want[0].numel()
            spread = float(exact.std())
            for i in (1, 2):
                apart = (got[i] - want[i]).abs() > 0.02 * spread
                # A code that falls to the other side of a boundary can move the whole row's refit.
                assert float(apart.float().mean()) < 0.02
            torch.testing.assert_close(got[3], want[3], rtol=0.01, atol=0)
            for g, w in zip(got[4], want[4]):
                error, expected = (float((y - exact).square().mean()) for y in (g, w))
                assert error <= 1.005 * expected + 1e-9 * spread**2
    return differing / max(codes, 1)


CASES = [
    (128, 1, CodecConfig(), torch.bfloat16), (64, 2, CodecConfig(), torch.float32),
    (80, 1, CodecConfig(), torch.float16),
    (16, 3, CodecConfig(), torch.bfloat16), (48, 2, CodecConfig(center=False), torch.bfloat16),
    (112, 1, CodecConfig(rule="clip"), torch.bfloat16), (32, 2, CodecConfig(rule="minmax"), torch.float32),
    (256, 1, CodecConfig(), torch.bfloat16), (96, 1, CodecConfig(rule="clip", center=False), torch.float16),
]  # fmt: skip


@pytest.mark.parametrize(("dim", "heads", "codec", "dtype"), CASES)
def test_pages_are_as_the_encoder_writes_them(dim, heads, codec, dtype, device):
    tiers = [(2, 4), (8, 2), (4, 8)]
    theirs, mine = stores(heads, dim, codec, dtype, tiers, device)
    k, v = random_rows(2, heads, 400, dim, dtype=dtype)
    k = k + torch.linspace(-3, 3, dim, dtype=dtype)
    for start, end in ((0, 130), (130, 131), (131, 200), (200, 400)):
        append((theirs, mine), k[:, :, start:end], v[:, :, start:end])
    closed = [p for s in theirs.sequences for p in s.pages if theirs.arena.cell(p, TIER)]
    torch.testing.assert_close(mine.arena.loss[closed].cpu(), theirs.arena.loss[closed], rtol=0.02, atol=1e-6)
    assert torch.equal(mine.arena.table[closed], theirs.arena.table[closed])
    for side, rows in enumerate((k, v)):
        assert compare(mine, theirs, rows, side) < (2e-3 if dtype != torch.float32 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_with_little_shared_memory_reads_the_matrix_in_place(device, dtype, monkeypatch):
    monkeypatch.setattr(encode, "most_shared", lambda device: 12 * 1024)
    theirs, mine = stores(2, 64, CodecConfig(), dtype, [(2, 4)], device)
    assert not mine.writer.geometry.staged and mine.writer.geometry.shared_bytes < 12 * 1024
    k, v = random_rows(1, 2, 330, 64, dtype=dtype)
    append((theirs, mine), k, v)
    assert compare(mine, theirs, k, 0) < 2e-3 and compare(mine, theirs, v, 1) < 2e-3


def test_rows_that_lie_scattered_are_read_in_place_or_copied(device):
    """Views as models make them: heads beside each other in a row, and views that start off any boundary."""
    for make in (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: pad(x)[..., 1:-2]):
        theirs, mine = stores(2, 32, CodecConfig(), torch.bfloat16, [(2, 2)], device)
        k, v = (make(x) for x in random_rows(1, 2, 200, 32, dtype=torch.bfloat16))
        append((theirs, mine), k, v)
        assert compare(mine, theirs, k, 0) < 2e-3 and compare(mine, theirs, v, 1) < 2e-3


def pad(x):
    return torch.nn.functional.pad(x, (1, 2))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rows_without_variance_and_huge_rows(bits, device):
    theirs, mine = stores(1, 32, CodecConfig(), torch.bfloat16, [(bits, bits)], device)
    k, v = random_rows(1, 1, 192, 32, dtype=torch.bfloat16)
    k[:, :, :64], v[:, :, :64] = 0, 0
    k[:, :, 64:128] *= 1e5
    v[:, :, 64:128] *= 1e5
    v[:, :, 130] = 0
    append((theirs, mine), k, v)
    assert bool(torch.isfinite(decoded(mine, 0, 0)[4][0]).all()) and compare(mine, theirs, k, 0) < 2e-3
    assert compare(mine, theirs, v, 1) < 2e-3


def test_losses_of_rows_far_from_zero_are_those_of_the_encoder(device):
    """Midpoints of 16 bits are off by more than a step there, so errors are not what a step alone tells."""
    theirs, mine = stores(1, 64, CodecConfig(center=False), torch.float32, [(8, 8)], device)
    k, v = (0.01 * torch.randn(1, 1, 256, 64, generator=generator(seed)) for seed in (1, 2))
    offsets = torch.tensor([0.0, 1.0, 3.0, 30.0]).repeat_interleave(64)[:, None]
    k, v = k + offsets, v + offsets
    v[:, :, :64] = 1.003
    append((theirs, mine), k, v)
    want, got = theirs.arena.loss[:4], mine.arena.loss[:4].cpu()
    torch.testing.assert_close(got, want, rtol=0.03, atol=1e-7)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bits=st.tuples(st.sampled_from((2, 4, 8)), st.sampled_from((2, 4, 8))), seed=st.integers(0, 99),
    scale=st.sampled_from((1e-12, 1e-3, 1.0, 3e4)), pages=st.integers(1, 4), heavy=st.booleans(),
)  # fmt: skip
def test_any_rows(device, bits, seed, scale, pages, heavy):
    theirs, mine = stores(2, 32, CodecConfig(), torch.bfloat16, [bits], device)
    g = generator(seed)
    k, v = (torch.randn(1, 2, 64 * pages, 32, generator=g) for _ in range(2))
    if heavy:
        k, v = k**3, v * torch.randn(v.shape[:3], generator=g).exp()[..., None]
    k, v = ((x * scale).bfloat16() for x in (k, v))
    append((theirs, mine), k, v)
    for side, rows in enumerate((k, v)):
        assert compare(mine, theirs, rows, side) < 5e-3
