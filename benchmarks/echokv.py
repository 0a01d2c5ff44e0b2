r"""Which bits do EchoKV's rule and ours settle on, and do they agree with themselves from seed to seed?

    python benchmarks/echokv.py --model MODEL --profile tuned.profile --text gsm8k_test.jsonl --text traces.jsonl \
        --csv OUT

EchoKV: ring canary, threshold tau0 = 0.022 at 4,096 tokens, K and V tied, simulated codes. Ours: anchored canary,
hysteresis at the tuned profile's threshold. Both see the same warm-up: 16 pieces of text drawn with seed + 100, fed 64
tokens at a time, the controller going on from one to the next; its tiers at the end are the snapshot of a seed.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from report import write_csv
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamina import Controller, LaminaCache, Profile
from lamina.basis.text import load_documents, token_sequences
from lamina.control.config import Policy
from lamina.control.state import merge_tiers
from lamina.control.tuning import settings_of
from lamina.engines.hf import cache_kwarg
from lamina.eval.echo import EchoCache, echo_controller

CHUNK = 64
WARM_UP = 16

Vector = list[tuple[int, int]]


@torch.no_grad()
def warmed_up(model: Any, new: Callable[[], LaminaCache], pieces: list[torch.Tensor]) -> None:
    """Feed all pieces, each to a cache of its own with the same controller."""
    for ids in pieces:
        cache = new()
        assert cache.control is not None
        cache.control.decode_tokens = CHUNK
        for chunk in ids.split(CHUNK, 1):
            model(chunk, use_cache=True, logits_to_keep=1, **cache_kwarg(model, cache))


def both(model: Any, profile: Profile) -> dict[str, tuple[Controller, Callable[[], LaminaCache]]]:
    """A fresh controller of each kind, and what makes its caches."""
    assert profile.tuning is not None
    echo = echo_controller(profile)
    config = replace(settings_of(profile.tuning), policy=Policy.HYSTERESIS)
    ours = LaminaCache(model, profile, controller=config).controller
    assert ours is not None
    return {
        "echokv": (echo, lambda: EchoCache(model, profile, echo)),
        "anchored hysteresis": (ours, lambda: LaminaCache(model, profile, controller=ours)),
    }


def main() -> None:
    """Run all workloads and seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--seq-len", type=int, default=768)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--csv", type=Path, required=True)
    args = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    profile = Profile.load(args.profile)
    table = []
    for text in args.text:
        vectors: dict[str, list[Vector]] = {}
        for seed in range(args.seeds):
            pieces = list(
                token_sequences(
                    load_documents(text), tokenizer, seq_len=args.seq_len, max_tokens=WARM_UP * args.seq_len,
                    seed=seed + 100,
                )
            )  # fmt: skip
            for name, (controller, new) in both(model, profile).items():
                warmed_up(model, new, pieces)
                vectors.setdefault(name, []).append(list(controller.tiers))
                print(Path(text).name, name, seed, f"{controller.average_bits:.3f}", flush=True)
        for name, found in vectors.items():
            merged = merge_tiers(found)
            apart = [sum(x != y for a, b in zip(u, v) for x, y in zip(a, b)) for u, v in combinations(found, 2)]
            for seed, vector in [*enumerate(found), ("merged", merged)]:
                flat = [b for pair in vector for b in pair]
                table.append(
                    {
                        "workload": Path(text).name, "controller": name, "seed": seed, "pieces": len(pieces),
                        "bits": f"{sum(flat) / len(flat):.3f}",
                        "sides_apart_between_seeds": f"{sum(apart) / len(apart):.1f}", "sides": len(flat),
                        "k": "".join(str(k) for k, _ in vector), "v": "".join(str(v) for _, v in vector),
                    }
                )  # fmt: skip
                print(table[-1], flush=True)
    write_csv(table, args.csv)


if __name__ == "__main__":
    main()
