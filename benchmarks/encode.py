"""How fast are pages encoded on the GPU, against copying the rows once?

    python benchmarks/encode.py --csv benchmarks/results/encode.csv

``chunk``: all pages of one layer's prefill chunk in one launch. ``step``: what a decode step adds to attention for a
batch, in a CUDA graph of many layers: transform of the query, append of the rows, and a 64th of encoding one page of
every sequence. Medians; a copy counts K and V once, read and written.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from decode_attention import graphed, median_ms
from report import write_csv
from triton.testing import do_bench

from lamina.attention.cuda.decode import NewRows, transform_queries
from lamina.attention.cuda.encode import CudaPageWriter
from lamina.attention.types import ReadBasis
from lamina.basis.encoder import PageEncoder
from lamina.basis.profile import LayerProfile
from lamina.basis.transforms import LayerTransform
from lamina.codec import CodecConfig
from lamina.pages import Budget, LayerStore, WindowConfig
from lamina.pages.writer import by_page

PAGE = 64
LAYERS = 36


def encoder_of(heads: int, dim: int, codec: CodecConfig) -> PageEncoder:
    """Random bases."""
    g = torch.Generator().manual_seed(0)
    r = torch.linalg.qr(torch.randn(2, heads, dim, dim, generator=g))[0]
    transform = LayerTransform(r[0], r[0], r[1], torch.randn(heads, dim, generator=g))
    profile = LayerProfile(transform, torch.full((heads, 3, 3), 0.1), torch.ones(heads), torch.ones(heads))
    return PageEncoder(profile, codec, dim**-0.5, "cuda")


def empty_store(encoder: PageEncoder, bits: int) -> LayerStore:
    """A store of one layer of bfloat16 rows."""
    heads, dim = encoder.mean_v.shape
    writer = CudaPageWriter(encoder, torch.bfloat16)
    return LayerStore(
        heads, dim, torch.bfloat16, "cuda", window=WindowConfig(), writer=writer, tiers=lambda: (bits, bits),
        budget=Budget(),
    )  # fmt: skip


def chunk_ms(tokens: int, bits: int, heads: int, dim: int, rule: str) -> tuple[float, float]:
    """Milliseconds of encoding a chunk, the launch alone, and of copying it."""
    store = empty_store(encoder_of(heads, dim, CodecConfig(rule=rule)), bits)  # type: ignore[arg-type]
    writer: Any = store.writer
    k, v = torch.randn(2, heads, tokens, dim, device="cuda", dtype=torch.bfloat16)
    n = tokens // PAGE
    store.arena.reserve(n, 6 * n, 1)
    pages = store.arena.open(list(range(0, tokens, PAGE)), [False] * n, [False] * n)
    jobs = writer.jobs(store.arena, pages, by_page(k), by_page(v))
    jobs[:, 7:9] = bits
    jobs[:, 9:15] = store.arena.close(pages, (bits, bits))
    jobs = jobs.cuda()
    ours = median_ms(lambda: writer.launch(jobs))
    rows, target = torch.stack([k, v]), torch.empty(2, heads, tokens, dim, device="cuda", dtype=torch.bfloat16)
    return ours, median_ms(lambda: target.copy_(rows))


def step_us(batch: int, heads: int, group: int, dim: int) -> dict[str, float]:
    """Microseconds a layer of a decode step: query and append, and encoding."""
    encoder = encoder_of(heads, dim, CodecConfig())
    basis = ReadBasis(encoder.q_forward, encoder.v_back, encoder.mean_v, encoder.kappa, dim**-0.5)
    damaged = torch.zeros(1, dtype=torch.int32, device="cuda")
    layers = []
    for _ in range(LAYERS):
        store = empty_store(encoder, 2)
        k, v = torch.randn(2, batch, heads, 200, dim, device="cuda", dtype=torch.bfloat16)
        store.append(k, v)
        q = torch.randn(batch, heads * group, 1, dim, device="cuda", dtype=torch.bfloat16)
        new = NewRows(k[:, :, :1], v[:, :, :1], damaged, 1)
        own = replace(basis, q_forward=basis.q_forward.clone())
        layers.append((store, q, new, store.view(), own))

    def transform() -> None:
        for _, q, new, view, own in layers:
            transform_queries(q, view, own, new)

    found = {"transform_append": 1e3 * float(do_bench(graphed(transform), return_mode="median")) / LAYERS}
    writer: Any = layers[0][0].writer
    jobs = []
    for store, _, _, _, _ in layers:
        rows = torch.randn(batch, 2, heads, PAGE, dim, device="cuda", dtype=torch.bfloat16)
        store.arena.reserve(batch, 0, 0)
        pages = store.arena.open([0] * batch, [False] * batch, [False] * batch)
        own = store.writer.jobs(store.arena, pages, rows[:, 0], rows[:, 1])  # type: ignore[attr-defined]
        own[:, 7:9], own[:, 9:15] = 2, -1
        jobs.append(own)
    all_jobs = torch.cat(jobs).cuda()
    encode = do_bench(graphed(lambda: writer.launch(all_jobs)), return_mode="median")
    found["encode"] = 1e3 * float(encode) / LAYERS / PAGE
    return found


def main() -> None:
    """Time all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, required=True)
    args = parser.parse_args()
    table: list[dict[str, Any]] = []

    def add(
        what: str, tokens: int, batch: int, shape: tuple[Any, ...], us: float, copy: str = "", ratio: str = ""
    ) -> None:
        names = ("tier", "kv_heads", "head_dim", "rule")
        row = {"what": what, "tokens": tokens, "batch": batch, **dict(zip(names, shape)), "us": f"{us:.2f}"}
        table.append(row | {"copy_us": copy, "ratio": ratio})
        print(table[-1], flush=True)

    for tokens, bits, heads, dim, rule in (
        *((8192, bits, 8, 128, "unbiased") for bits in (2, 4, 8)), (8192, 2, 8, 128, "clip"),
        (2048, 2, 8, 128, "unbiased"), (8192, 2, 8, 64, "unbiased"),
    ):  # fmt: skip
        ms, copy = chunk_ms(tokens, bits, heads, dim, rule)
        add("chunk", tokens, 1, (bits, heads, dim, rule), 1e3 * ms, f"{1e3 * copy:.1f}", f"{ms / copy:.2f}")
    for batch in (1, 32):
        found = step_us(batch, 8, 4, 128)
        for what, us in (*found.items(), ("step", math.fsum(found.values()))):
            add(what, 1, batch, (2, 8, 128, "unbiased"), us)
    write_csv(table, args.csv)


if __name__ == "__main__":
    main()
