"""What does the controller take? Decode steps with and without it, alternating, at the same context and tiers.

    python benchmarks/controller_overhead.py --model MODEL --profile P --context 2048

The controller measures and decides at its rate, but its threshold is such that all pages stay at 2 bits, so that both
caches hold the same bytes. The share is of whole steps, the rate included; a firing's own time is given as well.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from report import write_csv
from transformers import AutoModelForCausalLM

from lamina import ControllerConfig, LaminaCache, Profile
from lamina.engines.hf import cache_kwarg


@torch.no_grad()
def main() -> None:
    """Alternate steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--csv", type=Path, required=True)
    args = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    profile = Profile.load(args.profile)
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(100, 40_000, (1, args.context + args.steps), generator=g)
    config = ControllerConfig(policy="threshold", tau0=float("inf"), tiers=(2,))  # type: ignore[arg-type]
    caches = {
        "with": LaminaCache(model, profile, tiers=2, controller=config),
        "without": LaminaCache(model, profile, tiers=2),
    }
    fired: list[int] = []
    caches["with"].control.on_firing = lambda f: fired.append(f.step)  # type: ignore[union-attr]
    for cache in caches.values():
        model(ids[:, : args.context], use_cache=True, logits_to_keep=1, **cache_kwarg(model, cache))
    times: dict[str, list[float]] = {name: [] for name in caches}
    for t in range(args.context, args.context + args.steps):
        names = list(caches) if t % 2 else list(caches)[::-1]
        for name in names:
            start = time.perf_counter()
            model(ids[:, t : t + 1], use_cache=True, **cache_kwarg(model, caches[name]))
            times[name].append(time.perf_counter() - start)
    at = {step - 1 for step in fired}
    differences = [a - b for a, b in zip(times["with"], times["without"])]
    firing = statistics.median(d for i, d in enumerate(differences) if i in at)
    other = statistics.median(d for i, d in enumerate(differences) if i not in at)
    step = statistics.median(times["without"])
    row = {
        "context": args.context, "steps": args.steps, "firings": len(at), "ms_without": f"{1e3 * step:.2f}",
        "ms_with": f"{1e3 * statistics.median(times['with']):.2f}", "ms_of_a_firing": f"{1e3 * firing:.2f}",
        "ms_of_other_steps": f"{1e3 * other:.3f}",
        "share": f"{(firing * config.rate + other * (1 - config.rate)) / step:.4f}",
        "share_of_totals": f"{sum(times['with']) / sum(times['without']) - 1:.4f}",
    }  # fmt: skip
    print(row)
    write_csv([row], args.csv)


if __name__ == "__main__":
    main()
