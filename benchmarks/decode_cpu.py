"""Decode speed and memory on the CPU: LaminaCache against transformers' DynamicCache, in one run.

Fills each cache with a prompt of the given length, then times single-token steps, alternating between the two so that
both see the same machine. Reports tokens/s, the caches' bytes, and the growth of the process's resident memory when the
cache is filled (each in a process of its own, after both kinds of cache were used once).

    python benchmarks/decode_cpu.py MODEL PROFILE --context 2048 6144 --csv benchmarks/results/decode_cpu.csv
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from report import write_csv
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from lamina.basis.profile import Profile
from lamina.basis.text import load_documents, token_sequences
from lamina.engines.hf import LaminaCache, cache_kwarg

STEPS = 40
PREFILL = 512


def load(args: argparse.Namespace) -> tuple:
    """Model, profile and text."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    longest = max(args.context) + 3 * STEPS
    ids = next(token_sequences(load_documents(args.text), tokenizer, seq_len=longest, max_tokens=longest, seed=0))
    return model, Profile.load(args.profile), ids


def fill(model, cache, ids: torch.Tensor) -> None:
    """Prefill in chunks."""
    for start in range(0, ids.shape[1], PREFILL):
        model(ids[:, start : start + PREFILL], logits_to_keep=1, **cache_kwarg(model, cache))


def cache_bytes(cache) -> int:
    """Bytes of a cache's tensors."""
    if isinstance(cache, DynamicCache):
        return sum(x.keys.untyped_storage().nbytes() + x.values.untyped_storage().nbytes() for x in cache.layers)
    return sum(cache.memory().values())


def resident() -> int:
    """Resident bytes of this process."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["VmRSS"].split()[0]) * 1024


def resident_growth(args: argparse.Namespace) -> None:
    """In a process of its own: how much the resident memory grows while a cache fills and decodes."""
    model, profile, ids = load(args)
    # Libraries and compiled kernels are loaded once a process, whatever the cache: not counted.
    for warm in (DynamicCache(config=model.config), LaminaCache(model, profile, tiers=2)):
        fill(model, warm, ids[:, : PREFILL + 64])
        model(ids[:, :1], **cache_kwarg(model, warm))
    del warm
    gc.collect()
    lamina = args.measure == "lamina"
    before = resident()
    cache = LaminaCache(model, profile, tiers=2) if lamina else DynamicCache(config=model.config)
    fill(model, cache, ids[:, : args.context[0]])
    for i in range(STEPS):
        model(ids[:, args.context[0] + i : args.context[0] + i + 1], **cache_kwarg(model, cache))
    gc.collect()
    print(json.dumps({"growth": resident() - before, "total": resident()}))


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("profile")
    parser.add_argument("--text", default="default")
    parser.add_argument("--context", type=int, nargs="+", default=[2048, 6144])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tier", type=int, default=2)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--measure", choices=["lamina", "dynamic"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    if args.measure:
        resident_growth(args)
        return
    model, profile, ids = load(args)
    rows = []
    for context in args.context:
        caches = {
            "dynamic": DynamicCache(config=model.config),
            "lamina": LaminaCache(model, profile, tiers=args.tier),
        }
        for cache in caches.values():
            fill(model, cache, ids[:, :context])
        times: dict[str, list[float]] = {name: [] for name in caches}
        for i in range(3 * STEPS):
            for name, cache in caches.items():
                start = time.perf_counter()
                model(ids[:, context + i : context + i + 1], **cache_kwarg(model, cache))
                times[name].append(time.perf_counter() - start)
        for name, cache in caches.items():
            command = [sys.executable, __file__, args.model, args.profile, "--text", args.text]
            command += ["--context", str(context), "--dtype", args.dtype, "--measure", name]
            memory = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rows.append({
                "cache": name, "dtype": args.dtype, "context": context,
                "tokens_per_s": round(1 / statistics.median(times[name]), 2),
                "ms_median": round(1e3 * statistics.median(times[name]), 2),
                "cache_bytes": cache_bytes(cache), "resident_growth": memory["growth"], "resident": memory["total"],
            })  # fmt: skip
            print(rows[-1], flush=True)
    if args.csv:
        write_csv(rows, args.csv)


if __name__ == "__main__":
    main()
