"""What stands in for CUDA in tests: products and conversions as PTX defines them, and mistakes that are found."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from host import HostModule, needs_compiler
from lamina.attention.cuda.nvrtc import KernelError

pytestmark = needs_compiler
CPU = torch.device("cpu")
SOURCE = r"""
typedef const u8* Rows;
// A [16, 32 / size], B [8, 32 / size] and C [16, 8], rows one after the other.
template <class N, class Product>
DEVICE void product(Rows a, Rows b, N* c, Product multiply) {
    const int r = threadIdx.x / 4, t = threadIdx.x % 4;
    u32 x[4], y[2];
    for (int i = 0; i < 4; i++) x[i] = *(const u32*)(a + (r + 8 * (i & 1)) * 32 + 16 * (i >> 1) + 4 * t);
    for (int i = 0; i < 2; i++) y[i] = *(const u32*)(b + r * 32 + 16 * i + 4 * t);
    N sums[4];
    for (int i = 0; i < 4; i++) sums[i] = c[(r + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)];
    multiply(sums, x[0], x[1], x[2], x[3], y[0], y[1]);
    for (int i = 0; i < 4; i++) c[(r + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = sums[i];
}
extern "C" __global__ void f16(Rows a, Rows b, float* c) { product(a, b, c, [](auto&... x) { mma_f16(x...); }); }
extern "C" __global__ void bf16(Rows a, Rows b, float* c) { product(a, b, c, [](auto&... x) { mma_bf16(x...); }); }
extern "C" __global__ void u8s8(Rows a, Rows b, int* c) { product(a, b, c, [](auto&... x) { mma_u8s8(x...); }); }
extern "C" __global__ void u8u8(Rows a, Rows b, int* c) { product(a, b, c, [](auto&... x) { mma_u8u8(x...); }); }
extern "C" __global__ void s8s8(Rows a, Rows b, int* c) { product(a, b, c, [](auto&... x) { mma_s8s8(x...); }); }

extern "C" __global__ void matrix_transposed(u32* x) { x[threadIdx.x] = transposed(x[threadIdx.x]); }
extern "C" __global__ void to_halves(const float* x, u16* f, u16* b, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) { f[i] = to_f16(x[i]); b[i] = to_bf16(x[i]); }
}
extern "C" __global__ void from_halves(const u16* x, float* y, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = from_f16(x[i]);
}
extern "C" __global__ void prefix_sums(int* x) {
    int y = x[threadIdx.x];
    for (int z = 1; z < 32; z *= 2) {
        const int other = __shfl_up_sync(~0u, y, z);
        if (threadIdx.x >= z) y += other;
    }
    x[threadIdx.x] = y;
}
extern "C" __global__ void reversed(const float* x, float* y, int waits) {
    __shared__ float held[64];
    held[threadIdx.x] = x[threadIdx.x];
    if (waits) __syncthreads();
    y[threadIdx.x] = held[63 - threadIdx.x];
}
extern "C" __global__ void copied(const float* x, float* y, int left) {
    DYNAMIC_SHARED(float4, held);
    for (int i = threadIdx.x; i < 64; i += 32) { copy_16(shared_address(held + i), x + 4 * i); end_group(); }
    if (left == 0) wait_for_groups<0>();
    if (left == 1) wait_for_groups<1>();
    for (int i = threadIdx.x; i < 64; i += 32) *(float4*)(y + 4 * i) = held[i];
}
extern "C" __global__ void beyond(int at) { DYNAMIC_SHARED(u8, held); held[at] = 1; }
extern "C" __global__ void some_return(int first) { if (threadIdx.x >= first) __syncthreads(); }
extern "C" __global__ void lane_returned() { if (threadIdx.x != 5) { __shfl_sync(~0u, 1, 0); __syncwarp(); } }
extern "C" __global__ void diverged() { if (threadIdx.x % 2) __syncwarp(); else __any_sync(~0u, true); }
extern "C" __global__ void halves_of_a_warp(int* x) {
    if (threadIdx.x < 16) x[threadIdx.x] = __shfl_sync(0xffffu, (int)threadIdx.x, 3);
    else x[threadIdx.x] = __popc(__ballot_sync(0xffff0000u, threadIdx.x % 4 == 0));
}
"""


@pytest.fixture
def kernels() -> HostModule:
    return HostModule("host", {}, CPU, SOURCE)


def launch(kernels: HostModule, name: str, *arguments: object, threads: int = 32, shared: int = 0) -> None:
    kernels.launch(name, (1, 1, 1), threads, *arguments, shared=shared)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("f16", (torch.float16, torch.float16)),
        ("bf16", (torch.bfloat16, torch.bfloat16)),
        ("u8s8", (torch.uint8, torch.int8)),
        ("u8u8", (torch.uint8, torch.uint8)),
        ("s8s8", (torch.int8, torch.int8)),
    ],
)
def test_products_of_fragments(kernels: HostModule, name: str, kinds: tuple[torch.dtype, torch.dtype]) -> None:
    g = torch.Generator().manual_seed(1)
    if kinds[0].is_floating_point:
        a, b = (torch.randn(n, 16, generator=g).to(kind) for n, kind in zip((16, 8), kinds))
        c = torch.randn(16, 8, generator=g)
    else:
        bytes_ = torch.randint(0, 256, (24, 32), generator=g, dtype=torch.uint8)
        a, b = (x.contiguous().view(kind) for x, kind in zip(bytes_.split((16, 8)), kinds))
        c = torch.randint(-1000, 1000, (16, 8), generator=g, dtype=torch.int32)
    expected = c.double() + a.double() @ b.double().T
    launch(kernels, name, a, b, c)
    assert torch.equal(c, expected.to(c.dtype))


def test_a_matrix_is_transposed(kernels: HostModule) -> None:
    x = torch.arange(64, dtype=torch.int16).view(8, 8)
    y = x.clone()
    launch(kernels, "matrix_transposed", y)
    assert torch.equal(y, x.T)


def test_conversions_are_those_of_torch(kernels: HostModule) -> None:
    halves = torch.arange(65536).to(torch.uint16)
    found = torch.empty(65536)
    launch(kernels, "from_halves", halves, found, len(halves))
    torch.testing.assert_close(found, halves.view(torch.float16).float(), rtol=0, atol=0, equal_nan=True)
    rng = np.random.default_rng(0)
    bits = np.concatenate(
        [rng.integers(0, 2**32, 100_000), rng.integers(0x33000000, 0x47900000, 100_000), np.arange(9)]
    )
    x = torch.from_numpy(bits.astype(np.uint32).view(np.float32))
    f, b = torch.empty(2, len(x), dtype=torch.uint16)
    launch(kernels, "to_halves", x, f, b, len(x))
    for mine, kind in ((f, torch.float16), (b, torch.bfloat16)):
        torch.testing.assert_close(mine.view(kind), x.to(kind), rtol=0, atol=0, equal_nan=True)


def test_lanes_exchange_numbers(kernels: HostModule) -> None:
    x = torch.arange(32, dtype=torch.int32)
    y = x.clone()
    launch(kernels, "prefix_sums", y)
    assert torch.equal(y, x.cumsum(0).int())
    launch(kernels, "halves_of_a_warp", y)
    assert y.tolist() == [3] * 16 + [4] * 16


def test_a_missing_barrier_shows(kernels: HostModule) -> None:
    x = torch.arange(64.0)
    y = torch.zeros(64)
    launch(kernels, "reversed", x, y, 1, threads=64)
    assert torch.equal(y, x.flip(0))
    launch(kernels, "reversed", x, y, 0, threads=64)
    assert bool(y.isnan().any())


def test_copies_arrive_when_they_are_waited_for(kernels: HostModule) -> None:
    x = torch.arange(256.0)
    for left, arrived in ((0, 256), (1, 128), (2, 0)):
        y = torch.zeros(256)
        launch(kernels, "copied", x, y, left, shared=1024)
        assert torch.equal(y[:arrived], x[:arrived]) and bool(y[arrived:].isnan().all())


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("0 to 39 have returned; 40 to 63 wait at __syncthreads", lambda m: launch(m, "some_return", 40, threads=64)),
        ("of which 00000020 have returned|no thread", lambda m: launch(m, "lane_returned")),
        ("0 to 0 wait at __any_sync, mask ffffffff; 1 to 1 wait at __syncwarp", lambda m: launch(m, "diverged")),
        ("of which ff000000 have returned", lambda m: launch(m, "prefix_sums", torch.zeros(24), threads=24)),
        ("wrote byte 100 of 100", lambda m: launch(m, "beyond", 100, shared=100)),
        (
            "outside of shared memory|no multiple",
            lambda m: launch(m, "copied", torch.zeros(257)[1:], torch.zeros(1), 0),
        ),
        ("argument 0 of beyond has 8 bytes instead of 4", lambda m: launch(m, "beyond", ctypes.c_longlong(1))),
        ("takes 1 arguments, not 0", lambda m: launch(m, "beyond")),
        ("takes 1 arguments, not 2", lambda m: launch(m, "beyond", 1, 2)),
        ("there is no kernel other", lambda m: launch(m, "other")),
        ("a tensor is on meta", lambda m: launch(m, "prefix_sums", torch.zeros(32, device="meta"))),
        ("does not compile", lambda m: HostModule("host", {}, CPU, "int x = y;")),
    ],
)
def test_mistakes_are_named(kernels: HostModule, message: str, call: Callable[[HostModule], Tensor]) -> None:
    with pytest.raises(KernelError, match=message):
        call(kernels)
    x = torch.zeros(64)
    launch(kernels, "reversed", x, x, 1, threads=64)
