"""What does a bit buy? Live controllers against fixed tiers, on texts that neither calibration nor tuning has seen.

    lamina tune MODEL --profile P --data A --data B --target-bits 3 -o tuned.profile
    python benchmarks/live_quality.py --model MODEL --profile tuned.profile --text gsm8k_test.jsonl --text traces.jsonl
    python benchmarks/live_quality.py ... --max-kl 0.002 --profile budget.profile

Without ``--max-kl``: the mean KL of ``allocate`` at 3.0 and 2.5 bits against K4V2, K2V4 and INT2. With it, the
profile's own controller, which was tuned to that budget, against the cheapest of a family of fixed tier vectors that
stays within the budget on all of these very texts: those that the offline drift yields at different thresholds.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from report import write_csv
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamina import Profile
from lamina.basis.text import load_documents, token_sequences
from lamina.codec import TIERS
from lamina.control.policies import threshold
from lamina.control.tuning import settings_of
from lamina.eval.arms import ARMS
from lamina.eval.fidelity import ArmResult, measure_fidelity
from lamina.eval.tuning import LIVE, FixedArm

FIXED = ("lamina-int2", "lamina-k4v2", "lamina-k2v4", "lamina-live-2.5", "lamina-live-3")
STATIC_TRIALS = 4

Rows = list[tuple[ArmResult, str]]


def quality(model: Any, profile: Profile, text: list[Tensor]) -> Rows:
    """Fixed tiers and live allocation, which is compared with the fixed tiers of as many bits."""
    results = measure_fidelity(model, profile, [ARMS[name] for name in FIXED], text)
    kl = {r.name: r.kl_mean for r in results}
    line = (kl["lamina-int2"] + kl["lamina-k4v2"]) / 2
    limits = {"lamina-live-3": min(kl["lamina-k4v2"], kl["lamina-k2v4"]), "lamina-live-2.5": line}
    return [
        (r, f"{r.kl_mean / limits[r.name]:.2f} of {limits[r.name]:.5f}" if r.name in limits else "") for r in results
    ]


def budget(model: Any, profile: Profile, texts: dict[str, list[Tensor]], max_kl: float) -> dict[str, Rows]:
    """The tuned controller, and the cheapest fixed vector that stays within the budget on each of these very texts."""
    assert profile.tuning is not None
    signals = [dict(zip(TIERS, row)) for row in profile.tuning.drift]
    live = {name: measure_fidelity(model, profile, [LIVE], text)[0] for name, text in texts.items()}
    low, high, best = 0.0, float("inf"), None
    tau = settings_of(profile.tuning).tau0
    for n in range(STATIC_TRIALS):
        flat = [threshold(s, tau, TIERS, 8) for s in signals]
        arm = FixedArm(f"static-{n}", "", (2, 2), vector=tuple(zip(flat[::2], flat[1::2])))
        static = {name: measure_fidelity(model, profile, [arm], text)[0] for name, text in texts.items()}
        worst = max(r.kl_mean for r in static.values())
        print(f"static {sum(flat) / len(flat):.3f} bits: worst KL {worst:.6f}", flush=True)
        if worst <= max_kl:
            low = tau
            if best is None or sum(flat) < best[0]:
                best = sum(flat), static
        else:
            high = tau
        step = max(0.25, min(4.0, 0.97 * max_kl / worst))
        tau = tau * step if low < tau * step < high else (max(low, tau / 16) * min(high, tau * 16)) ** 0.5
    rows: dict[str, Rows] = {n: [(r, f"{r.kl_mean / max_kl:.2f} of the budget")] for n, r in live.items()}
    if best is not None:
        spent = sum(r.tier_mean for r in live.values()) / len(live) / (best[0] / len(signals)) - 1
        for name, r in best[1].items():
            r.name = "best static"
            rows[name].append(
                (r, f"{r.kl_mean / max_kl:.2f} of the budget; over all texts live spends {spent:+.1%} bits")
            )
    return rows


def main() -> None:
    """Run on every text and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--max-kl", type=float)
    parser.add_argument("--csv", type=Path, required=True)
    args = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    profile = Profile.load(args.profile)
    texts = {
        name: list(
            token_sequences(load_documents(name), tokenizer, seq_len=args.seq_len, max_tokens=args.max_tokens, seed=0)
        )
        for name in args.text
    }
    if args.max_kl is None:
        found = {name: quality(model, profile, text) for name, text in texts.items()}
    else:
        found = budget(model, profile, texts, args.max_kl)
    table = []
    for name, results in found.items():
        for r, verdict in results:
            table.append(
                {
                    "text": Path(name).name, "tokens": len(texts[name]) * args.seq_len, "seq_len": args.seq_len,
                    "arm": r.name,
                    "tier_mean": round(r.tier_mean, 4), "bits_history": round(r.bits_history, 4),
                    "kl_mean": f"{r.kl_mean:.6f}", "kl_p99": f"{r.kl_p99:.6f}", "top1": f"{r.top1:.4f}",
                    "max_kl": args.max_kl or "", "verdict": verdict,
                }
            )  # fmt: skip
            print(Path(name).name, r.name, f"{r.tier_mean:.3f} bits, KL {r.kl_mean:.6f}", verdict, flush=True)
    write_csv(table, args.csv)


if __name__ == "__main__":
    main()
