"""How many bytes does the cache allocate, everything counted, next to a bfloat16 cache of the same rows?

python benchmarks/kv_bytes.py --csv benchmarks/results/kv_bytes.csv
"""

import argparse
from pathlib import Path

import torch
from report import write_csv

from lamina.basis.encoder import PageEncoder
from lamina.basis.profile import LayerProfile
from lamina.basis.transforms import make_transform
from lamina.codec import CodecConfig
from lamina.pages import Budget, EncodingWriter, LayerStore, WindowConfig

HEADS = 3


def make_store(dim: int, bits: tuple[int, int]) -> LayerStore:
    """An empty bfloat16 layer."""
    transform = make_transform("hadamard", n_heads=HEADS, head_dim=dim).float()
    profile = LayerProfile(transform, torch.zeros(HEADS, 3, 3), torch.ones(HEADS), torch.ones(HEADS))
    encoder = PageEncoder(profile, CodecConfig(), dim**-0.5, "cpu")
    return LayerStore(
        HEADS,
        dim,
        torch.bfloat16,
        "cpu",
        window=WindowConfig(),
        writer=EncodingWriter(encoder),
        tiers=lambda: bits,
        budget=Budget(),
    )


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    rows = []
    for dim in (64, 128):
        for bits in ((2, 2), (4, 2), (4, 4), (8, 8)):
            for fed, step in (("one chunk", 8192), ("token by token", 1)):
                store = make_store(dim, bits)
                for _ in range(0, 8192, step):
                    store.append(*(torch.randn(1, HEADS, step, dim).bfloat16() for _ in range(2)))
                memory = store.memory()
                assert sum(memory.values()) == store.budget.used
                share = sum(memory.values()) / (4 * HEADS * dim * 8192)
                packed, elements = store.history_bits()
                rows.append(
                    {"head_dim": dim, "tier_k": bits[0], "tier_v": bits[1], "tokens": 8192, "fed": fed}
                    | {"of_bf16": round(share, 4), "bits_history": round(packed / elements, 4)}
                    | memory
                )
                print(rows[-1], flush=True)
    if args.csv:
        write_csv(rows, args.csv)


if __name__ == "__main__":
    main()
