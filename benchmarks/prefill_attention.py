"""How fast is attention of a chunk over pages, against the best 16-bit attention that torch has, on this GPU?

    python benchmarks/prefill_attention.py --csv benchmarks/results/prefill_attention.csv

Everything from q to o in the engine's basis is counted; medians of a few runs, which are long beside their launches.
Pages hold random codes. ``bf16`` attends to the same rows in 16 bits, in the faster of two ways: all at once with a
causal mask aligned to the lower right, or flash attention to the prefix and to the chunk, merged by their log-sum-exp.
"""

import argparse
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode_attention import Case, random_view
from report import write_csv
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench

from lamina.attention.cuda.prefill import attend_prefill
from lamina.attention.types import ReadBasis
from lamina.pages.table import COLUMNS, ROWS, START, TIER
from lamina.pages.view import StoreView

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
PREFIXES, CHUNKS, TIERS = (8192, 32768, 131072), (512, 2048, 8192), (2, 4, 8)
MOST_MS = 150
"""Time that a measurement may take, about."""


@dataclass(frozen=True)
class Rows:
    """What a chunk is attended with."""

    q: Tensor
    k: Tensor
    v: Tensor


def median_ms(run: Any) -> float:
    """Median of a few runs; one of them at least."""
    return float(do_bench(run, warmup=10, rep=MOST_MS, return_mode="median"))


def view_of(prefix: int, chunk: int, bits: int) -> StoreView:
    """Packed pages of a prefix, and open pages of the chunk behind them."""
    view, _ = random_view(Case(1, prefix, HEADS, KV_HEADS, DIM, ((bits, 1.0),)))
    first, more = len(view.table), -(-chunk // PAGE)
    pages = torch.full((more, COLUMNS), -1, dtype=torch.int32)
    pages[:, START] = prefix + PAGE * torch.arange(more)
    pages[:, ROWS], pages[:, TIER : TIER + 2] = PAGE, 0
    ids = torch.arange(first, first + more, dtype=torch.int32)[None].cuda()
    return replace(
        view, table=torch.cat([view.table, pages.cuda()]), page_ids=torch.cat([view.page_ids, ids], 1),
        lengths=view.lengths + chunk,
    )  # fmt: skip


def bf16_ms(prefix: int, rows: Rows) -> tuple[float, str]:
    """Milliseconds over 16-bit rows, and the way that takes them."""
    shape = (1, KV_HEADS, prefix, DIM)
    before = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    k, v = (torch.cat([x, y], 2) for x, y in zip(before, (rows.k, rows.v)))
    flash = torch.ops.aten._scaled_dot_product_flash_attention

    def in_two() -> Tensor:
        (a, of_a), (b, of_b) = (
            flash(rows.q, x, y, 0.0, causal, False)[:2] for x, y, causal in ((*before, False), (rows.k, rows.v, True))
        )
        return torch.lerp(b, a, (of_a - of_b).sigmoid()[..., None].to(a.dtype))

    mask = causal_lower_right(rows.q.shape[2], k.shape[2])
    ways = {
        "at once": partial(scaled_dot_product_attention, rows.q, k, v, attn_mask=mask, enable_gqa=True),
        "in two": in_two,
    }
    found = {}
    for name, way in ways.items():
        try:
            found[name] = median_ms(way)
        except (RuntimeError, TypeError, ValueError) as error:
            print(f"  {name}: {str(error).splitlines()[0][:80]}")
    best = min(found, key=found.__getitem__)
    return found[best], best


def main() -> None:
    """Time all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, required=True)
    args = parser.parse_args()
    a = torch.randn(KV_HEADS, DIM, DIM, device="cuda") / math.sqrt(DIM)
    r = torch.linalg.qr(torch.randn(KV_HEADS, DIM, DIM, device="cuda"))[0].contiguous()
    mean, kappa = torch.randn(KV_HEADS, DIM, device="cuda"), torch.full((KV_HEADS, 3, 3), 0.1, device="cuda")
    basis = ReadBasis(a, r, mean, kappa, DIM**-0.5)
    table = []
    for prefix in PREFIXES:
        for chunk in CHUNKS:
            shapes = ((1, heads, chunk, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
            rows = Rows(*(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes))
            base, way = bf16_ms(prefix, rows)
            pairs = chunk * (prefix + (chunk + 1) / 2)
            for bits in TIERS:
                view = view_of(prefix, chunk, bits)
                ms = median_ms(partial(attend_prefill, rows.q, view, basis, (rows.k, rows.v)))
                table.append(
                    {
                        "prefix": prefix, "chunk": chunk, "q_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM,
                        "tier": bits, "ms": f"{ms:.3f}", "bf16_ms": f"{base:.3f}", "bf16_way": way,
                        "speedup": f"{base / ms:.2f}", "tflops": f"{4 * pairs * DIM * HEADS / ms / 1e9:.0f}",
                        "bf16_tflops": f"{4 * pairs * DIM * HEADS / base / 1e9:.0f}",
                    }
                )  # fmt: skip
                print(" ".join(f"{k}={v}" for k, v in table[-1].items()), flush=True)
                del view
            torch.cuda.empty_cache()
    write_csv(table, args.csv)


if __name__ == "__main__":
    main()
