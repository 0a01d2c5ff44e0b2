"""Does the controller follow a text that changes? One sequence that goes from gsm8k to agent traces to code.

    python benchmarks/adaptation.py --model MODEL --profile tuned.profile --text gsm8k_test.jsonl --text traces.jsonl \\
        --text code.jsonl --csv OUT

``hysteresis`` is compared with ``threshold`` at the tau of a grid that gives the nearest mean KL.
"""

import argparse
import statistics
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from report import write_csv
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamina import ControllerConfig, Profile
from lamina.basis.text import load_documents, token_sequences
from lamina.control.config import Policy
from lamina.control.tuning import settings_of
from lamina.eval.arms import LiveArm
from lamina.eval.fidelity import measure_fidelity

AFTER = 200
GRID = (1.0, 1.1)


@dataclass
class Run:
    """What one rule did over all streams."""

    name: str
    tau0: float
    kl: float
    after: float
    bits: float
    up: int = 0
    down: int = 0

    @property
    def flips(self) -> int:
        """Changes of a layer side's tier."""
        return self.up + self.down


@dataclass(frozen=True)
class HeardArm(LiveArm):
    """A live arm whose decisions are kept."""

    heard: Any = None

    def open(self, model: Any, profile: Profile, window: Any) -> Any:
        """Caches that share a controller."""
        new = super().open(model, profile, window)

        def heard() -> Any:
            cache = new()
            cache.control.on_firing = self.heard.append
            return cache

        return heard


def run_rules(
    model: Any, profile: Profile, streams: list[Tensor], switches: list[int], rules: dict[str, ControllerConfig]
) -> dict[str, Run]:
    """All rules in lockstep; the controller starts anew with every stream."""
    decisions: dict[str, list[list[Any]]] = {name: [] for name in rules}
    kl: dict[str, list[Tensor]] = {name: [] for name in rules}
    bits: dict[str, list[float]] = {name: [] for name in rules}
    after: dict[str, list[float]] = {name: [] for name in rules}
    for stream in streams:
        here: dict[str, list[Tensor]] = {name: [] for name in rules}
        for name in rules:
            decisions[name].append([])
        arms = [HeardArm(name, "", (2, 2), controller=c, heard=decisions[name][-1]) for name, c in rules.items()]
        results = measure_fidelity(
            model, profile, arms, [stream], on_kl=lambda name, _, x, here=here: here[name].append(x)
        )
        for r in results:
            tokens = torch.cat(here[r.name])
            kl[r.name].append(tokens)
            bits[r.name].append(r.tier_mean)
            after[r.name] += [float(tokens[s : s + AFTER].mean()) for s in switches]
    runs = {}
    for name, config in rules.items():
        changes = [
            b - a
            for heard in decisions[name]
            for first, second in pairwise(heard)
            for x, y in zip(first.tiers, second.tiers)
            for a, b in zip(x, y)
        ]
        runs[name] = Run(
            name, config.tau0, float(torch.cat(kl[name]).mean()), statistics.fmean(after[name]),
            statistics.fmean(bits[name]), sum(c > 0 for c in changes), sum(c < 0 for c in changes),
        )  # fmt: skip
    return runs


def main() -> None:
    """Run the rules over a grid of thresholds, and pick the comparable ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--part", type=int, default=1536, help="tokens of each text in a stream")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--csv", type=Path, required=True)
    args = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    profile = Profile.load(args.profile)
    assert profile.tuning is not None
    parts = [
        list(
            token_sequences(
                load_documents(t), tokenizer, seq_len=args.part, max_tokens=args.part * args.streams, seed=1
            )
        )
        for t in args.text
    ]
    streams = [torch.cat(pieces, 1) for pieces in zip(*parts)]
    switches = [args.part * i for i in range(1, len(parts))]
    tau = settings_of(profile.tuning).tau0
    base = ControllerConfig(policy=Policy.THRESHOLD, tau0=tau)
    rules = {"threshold": base}
    for factor in GRID:
        hysteresis = replace(base, policy=Policy.HYSTERESIS, tau0=tau * factor)
        rules[f"hysteresis x{factor}"] = hysteresis
    runs = run_rules(model, profile, streams, switches, rules)
    fixed = runs["threshold"]
    nearest = min((r for r in runs.values() if r is not fixed), key=lambda r: abs(r.kl / fixed.kl - 1))
    for r in runs.values():
        mark = "*" if r in (fixed, nearest) else " "
        print(
            f"{mark} {r.name:18s} KL {r.kl:.6f}, after a switch {r.after:.6f}, {r.bits:.3f} bits, "
            f"{r.up} up, {r.down} down"
        )
    table = [
        {
            "rule": r.name, "tau0": f"{r.tau0:.3g}", "kl_mean": f"{r.kl:.6f}", "kl_after_switch": f"{r.after:.6f}",
            "tier_mean": f"{r.bits:.4f}", "up": r.up, "down": r.down, "tokens": sum(s.numel() for s in streams),
            "compared": r in (fixed, nearest),
        }
        for r in runs.values()
    ]  # fmt: skip
    write_csv(table, args.csv)


if __name__ == "__main__":
    main()
