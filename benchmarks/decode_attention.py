"""How fast is decode attention over pages, against the best 16-bit attention that torch has, on this GPU?

    python benchmarks/decode_attention.py --csv benchmarks/results/decode_attention.csv

Everything from q to o in the engine's basis is counted, in a CUDA graph; medians, with the L2 cache cleared before each
run.
Pages hold random codes. ``copy`` is a device-to-device copy of as many bytes as are read, counted once.
"""

import argparse
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from report import write_csv
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from lamina.attention.cuda.decode import attend_cuda
from lamina.attention.types import ReadBasis
from lamina.pages import WindowConfig
from lamina.pages.layout import RecordLayout
from lamina.pages.table import COLUMNS, EXACT, FINE, FINEST, ROWS, START, TIER
from lamina.pages.view import StoreView

PAGE = 64
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Case:
    """One row of the table; ``mix`` is a share of pages by tier, ``windows`` whether some pages are exact."""

    batch: int
    context: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    mix: tuple[tuple[int, float], ...] = ((2, 1.0),)
    windows: bool = False


def graphed(run: Any) -> Any:
    """A CUDA graph of a function."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def median_ms(run: Any) -> float:
    """Median of a graph's replays."""
    return float(do_bench(graphed(run), warmup=25, rep=150, return_mode="median"))


def random_view(case: Case) -> tuple[StoreView, int]:
    """Pages of random codes, and the bytes that attention reads of them."""
    layout = RecordLayout(case.kv_heads, case.head_dim)
    pages = case.context // PAGE
    n, device = case.batch * pages, "cuda"
    records = torch.randint(0, 256, (n, layout.record_bytes), dtype=torch.uint8, device=device)
    fields = layout.views(records)
    h = case.kv_heads
    fields.scale.copy_(((torch.rand(n, 2, h, PAGE, device=device) * 0.2 + 0.4).view(torch.int32) >> 15).to(torch.int16))
    fields.mid.copy_(torch.randn(n, 2, h, PAGE, device=device) * 0.1)
    fields.gain.copy_(((torch.ones(n, 2, h, 2, device=device)).view(torch.int32) >> 15).to(torch.int16))
    fields.center_scale.copy_(((torch.full((n, h), 0.01, device=device)).view(torch.int32) >> 15).to(torch.int16))
    table = torch.full((n, COLUMNS), -1, dtype=torch.int32)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).int()
    page_ids = order.view(case.batch, pages)
    position = torch.arange(pages, dtype=torch.int32) * PAGE
    table[page_ids.flatten().long(), START] = position.repeat(case.batch)
    table[:, ROWS] = PAGE
    g = torch.Generator().manual_seed(1)
    tiers = torch.empty(n, dtype=torch.int32)
    shares = torch.tensor([share for _, share in case.mix])
    tiers = torch.tensor([bits for bits, _ in case.mix])[torch.multinomial(shares, n, True, generator=g)].int()
    table[:, TIER] = table[:, TIER + 1] = tiers
    used = 0
    for bits, columns in ((4, (FINE, FINE + 1)), (8, tuple(range(FINEST, FINEST + 4)))):
        ids = (tiers >= bits).nonzero()[:, 0]
        for column in columns:
            table[ids, column] = torch.arange(used, used + len(ids), dtype=torch.int32)
            used += len(ids)
    slabs = torch.randint(0, 256, (max(used, 1), h, PAGE, case.head_dim // 4), dtype=torch.uint8, device=device)
    window = WindowConfig(64, 256, 64) if case.windows else WindowConfig(0, 0, 0)
    exact = torch.randn(1, 2, h, PAGE, case.head_dim, device=device).bfloat16()
    exact_bytes = 0
    if case.windows:
        near = (position < 64) | (position >= (case.context - 1) // 64 * 64 - 256)
        ids = page_ids[:, near].flatten().long()
        table[ids, EXACT] = torch.arange(len(ids), dtype=torch.int32)
        exact = torch.randn(len(ids), 2, h, PAGE, case.head_dim, device=device).bfloat16()
        exact_bytes = exact.numel() * 2
        n -= len(ids)
    lengths = torch.full((case.batch,), case.context, dtype=torch.int32)
    view = StoreView(layout, records, slabs, exact, table.cuda(), page_ids.cuda(), lengths.cuda(), window)
    return view, n * layout.record_bytes + used * layout.slab_bytes + exact_bytes


def bf16_ms(case: Case) -> tuple[float, str]:
    """The fastest of torch's backends on 16-bit rows."""
    shape = (case.batch, case.kv_heads, case.context, case.head_dim)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(case.batch, case.q_heads, 1, case.head_dim, device="cuda", dtype=torch.bfloat16)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, enable_gqa=True)
    found = {}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                found[name] = median_ms(attend)
        except RuntimeError as error:
            print(f"  {name}: {str(error).splitlines()[0][:80]}")
    best = min(found, key=found.__getitem__)
    return found[best], best


def copy_gbps(n_bytes: int) -> float:
    """GB/s of a copy, bytes read and written."""
    source = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * n_bytes / float(do_bench(lambda: target.copy_(source), return_mode="median")) / 1e6


def lamina_ms(case: Case) -> tuple[float, int]:
    """Milliseconds and packed bytes."""
    view, n_bytes = random_view(case)
    h, d = case.kv_heads, case.head_dim
    a = torch.randn(h, d, d, device="cuda") / math.sqrt(d)
    r = torch.linalg.qr(torch.randn(h, d, d, device="cuda"))[0].contiguous()
    basis = ReadBasis(a, r, torch.randn(h, d, device="cuda"), torch.full((h, 3, 3), 0.1, device="cuda"), d**-0.5)
    q = torch.randn(case.batch, case.q_heads, 1, d, device="cuda", dtype=torch.bfloat16)
    return median_ms(lambda: attend_cuda(q, view, basis)), n_bytes


CASES = [
    *(Case(*shape, mix=((bits, 1.0),)) for shape in ((8, 32768), (1, 131072), (32, 8192)) for bits in (2, 4, 8)),
    Case(8, 32768, mix=((2, 0.5), (4, 0.5))),
    Case(8, 32768, mix=((2, 0.45), (4, 0.45), (8, 0.1))),
    *(Case(8, 32768, mix=((bits, 1.0),), windows=True) for bits in (2, 4)),
    Case(8, 32768, q_heads=64), Case(8, 32768, q_heads=8, head_dim=64), Case(8, 32768, q_heads=32, head_dim=64),
    *(Case(1, n) for n in (8192, 32768, 65536, 262144, 524288)),
    *(Case(n, 8192) for n in (1, 4, 16, 64)),
]  # fmt: skip


def main() -> None:
    """Time all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--only", type=int)
    args = parser.parse_args()
    table, baselines = [], {}
    for case in CASES[: args.only]:
        key = (case.batch, case.context, case.q_heads, case.kv_heads, case.head_dim)
        ms, n_bytes = lamina_ms(case)
        if key not in baselines:
            baselines[key] = bf16_ms(case)
        base, backend = baselines[key]
        mix = " ".join(f"{bits}:{share:g}" for bits, share in case.mix)
        tier = case.mix[0][0] if len(case.mix) == 1 else ""
        table.append(
            {
                "triton": triton.__version__, "batch": case.batch, "context": case.context, "q_heads": case.q_heads,
                "kv_heads": case.kv_heads, "head_dim": case.head_dim, "tier_k": tier, "tier_v": tier, "mix": mix,
                "windows": case.windows, "ms": f"{ms:.4f}", "bf16_ms": f"{base:.4f}", "bf16_backend": backend,
                "speedup": f"{base / ms:.2f}", "packed_gbps": f"{n_bytes / ms / 1e6:.0f}",
                "copy_gbps": f"{copy_gbps(n_bytes):.0f}",
            }
        )  # fmt: skip
        print(" ".join(f"{k}={v}" for k, v in table[-1].items() if k != "triton"), flush=True)
        torch.cuda.empty_cache()
    write_csv(table, args.csv)


if __name__ == "__main__":
    main()
