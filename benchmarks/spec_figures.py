"""The figures that the design was chosen by, next to what the product measures today, with why they differ.

    python benchmarks/spec_figures.py --model smollm2-135m --profile smollm2.profile --gsm8k data/gsm8k_test.jsonl \
        --agent data/agent_traces.jsonl --csv benchmarks/results/spec_figures.csv --page docs/figures.md

Stated figures are those of Lamina SPEC 8 for SmolLM2-135M: float32, teacher-forced, sequences of 2,048 tokens, 64 first
and 256 recent tokens exact, mean KL to the exact run. Correlations of canaries come from canary_truth.csv.
"""

import argparse
import csv
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from report import write_csv
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamina.basis.profile import Profile
from lamina.basis.text import load_documents, token_sequences
from lamina.eval.arms import ARMS, LAMINA, Arm
from lamina.eval.fidelity import measure_fidelity

TOKENS = 2048
FAR = 0.7
"""Share of the model's positions that far text starts at."""
ONE_SIDE = [
    Arm("k2v8", "K at 2 bits, V as good as exact", (2, 8)),
    Arm("k2v8-plain", "the same without mass correction", (2, 8), codec=replace(LAMINA, mass_correction=False)),
    Arm("k4v8", "K at 4 bits, V as good as exact", (4, 8)),
    Arm(
        "k4v8-uncentred",
        "the same without page centers and mass correction",
        (4, 8),
        codec=replace(LAMINA, mass_correction=False, center=False),
    ),
    Arm("k8v2", "V at 2 bits, K as good as exact", (8, 2)),
    Arm("int2-plain", "without mass correction", (2, 2), codec=replace(LAMINA, mass_correction=False)),
]
NEAR_ARMS = ["naive-int2", "hadamard-int2", "oscar-int2", "kivi-int2", "naive-int4", "lamina-int2", "lamina-k4v2"]
FAR_ARMS = ["lamina-int2", "lamina-k4v2"]

TEXT = "other sequences of the text; other calibration text"
POSITIONS = (
    "stated for calibration at positions 0 to 2k, to judge by K+V there (0.0084, 0.0138; at random ones 0.0170, "
    "0.0266); profiles are made at random ones; K+V is 1.55 times the stated on the same sequence of gsm8k"
)
SPAN = "page centers, and 4-bit scales that start from the row's span; the next row has no centers"
GAUSSIAN = "the rest is the span: started from the Gaussian step as stated, a run of its own gave 0.00177 and 0.00236"
MASS = "stated before the mass correction"


@dataclass(frozen=True)
class Figure:
    """Rows of the table: what, which arm of ours, stated for gsm8k and maybe agent traces, and why ours may differ."""

    what: str
    arm: str
    stated: tuple[float, ...]
    why: str
    far: bool = False


FIGURES = [
    Figure("K+V naive INT2", "naive-int2", (1.22, 1.43), TEXT),
    Figure("K+V Hadamard INT2 (QuaRot)", "hadamard-int2", (0.231, 0.323), TEXT),
    Figure("K+V OSCAR INT2, shared, clipped", "oscar-int2", (0.102, 0.189), TEXT),
    Figure("K+V KIVI INT2, groups of 32 tokens", "kivi-int2", (0.067, 0.162), TEXT),
    Figure("K+V naive INT4", "naive-int4", (0.0032, 0.0081), TEXT),
    Figure("K INT2 balanced, unbiased scale", "k2v8-plain", (0.0076, 0.0138), POSITIONS),
    Figure("K INT2 balanced, as shipped", "k2v8", (0.0076, 0.0138), MASS),
    Figure("V INT2 U_S H, unbiased scale", "k8v2", (0.0017, 0.0044), TEXT),
    Figure("K INT4 balanced, unbiased scale", "k4v8", (0.0016, 0.0032), SPAN),
    Figure("K INT4 balanced, unbiased scale, no centers", "k4v8-uncentred", (0.0016, 0.0032), GAUSSIAN),
    Figure("K+V INT2, offset 0", "int2-plain", (0.0099, 0.0141), TEXT),
    Figure("K+V INT2, offset 0, calibrated on documentation", "int2-plain", (0.0111,), "other sequences"),
    Figure("K+V INT2, offset 0, as shipped", "lamina-int2", (0.0099, 0.0141), MASS),
    Figure("K+V INT2, offset 5.7k, as shipped", "lamina-int2", (0.0089, 0.0141), MASS, far=True),
    Figure("K4V2, offset 0 (stated as 0.0013 to 0.0040)", "lamina-k4v2", (0.0040, 0.0040), MASS),
    Figure("K4V2, offset 5.7k (stated as 0.0013 to 0.0040)", "lamina-k4v2", (0.0040, 0.0040), MASS, far=True),
]
CANARIES = [
    ("anchored, log-correlation of K with the truth, 2 bits", "anchored", "k2", 0.985),
    ("anchored, 4 bits", "anchored", "k4", 0.985),
    ("anchored, V at 2 bits", "anchored", "v2", 0.98),
    ("anchored, V at 4 bits", "anchored", "v4", 0.97),
    ("anchored, median ratio of K to the truth, 2 bits", "anchored", "ratio_k2", 1.0),
    ("ring, log-correlation of K, 2 bits", "ring", "k2", -0.32),
    ("ring, 4 bits", "ring", "k4", -0.26),
    ("ring, median ratio of K to the truth, 2 bits", "ring", "ratio_k2", 14.0),
]
SUMS = "all queries are summed up where attention reads, instead of 64 sampled rows"
NOT_MEASURED = [
    ("least-squares scales", "the product has no such rule; its own takes their bias away"),
    ("static or previous page's centers", "the product has page centers alone"),
    ("calibration at positions 0 to 2k alone", "profiles are made at random positions; key_bias.csv plants an offset"),
    ("the second model, with a large bias of keys", "not on this machine; key_bias.csv has its stand-in"),
    ("pages of 128 and 32 tokens", "the size of a page is fixed"),
]  # fmt: skip


def measure(model: Any, tokenizer: Any, profile: Profile, text: str) -> dict[tuple[str, bool], float]:
    """Mean KL by arm, near and far."""
    (ids,) = token_sequences(load_documents(text), tokenizer, seq_len=TOKENS, max_tokens=TOKENS, seed=0)
    far = int(FAR * model.config.max_position_embeddings)
    found = {}
    for arms, offset in (([ARMS[n] for n in NEAR_ARMS] + ONE_SIDE, 0), ([ARMS[n] for n in FAR_ARMS], far)):
        for result in measure_fidelity(model, profile, arms, [ids], position_offset=offset):
            found[result.name, offset > 0] = result.kl_mean
            print(text, offset, result.name, f"{result.kl_mean:.3g}", flush=True)
    return found


def canary_rows() -> list[dict[str, Any]]:
    """Canaries from the CSV of their own benchmark."""
    with (Path(__file__).parent / "results" / "canary_truth.csv").open() as f:
        given = {row["canary"]: row for row in csv.DictReader(f) if row["text"] == "gsm8k_test 1500"}
    return [
        _row(what, "gsm8k", stated, float(given[canary][column]), canary, SUMS if canary == "anchored" else TEXT)
        for what, canary, column, stated in CANARIES
    ]


def _row(what: str, text: str, stated: float, measured: float, arm: str, why: str) -> dict[str, Any]:
    return {
        "figure": what, "text": text, "stated": f"{stated:.3g}", "measured": f"{measured:.3g}",
        "measured_over_stated": f"{measured / stated:.2f}", "arm": arm, "why_they_differ": why,
    }  # fmt: skip


def page(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    lines = [
        "# Figures of the design, measured again",
        "What the design was chosen by (SmolLM2-135M, float32, one sequence of 2,048 tokens, the first 64 and the last",
        "256 tokens exact, mean KL in nats) next to the product's own run with the committed code:",
        "`benchmarks/spec_figures.py` writes both this page and",
        "[`spec_figures.csv`](../benchmarks/results/spec_figures.csv). The profile is calibrated on 16,384 tokens of",
        "the default text. One sequence is tens of percent from another, and so are ratios: over 8,192 tokens of gsm8k",
        "the arm as shipped (lamina-int2) has 0.0069, over 4,096 of the traces 0.0138",
        "([`fidelity_smollm2.csv`](../benchmarks/results/fidelity_smollm2.csv)).",
        "",
        "| figure | text | stated | measured | ratio | why they differ |",
        "|---|---|--:|--:|--:|---|",
    ]
    lines.insert(1, "")
    for r in rows:
        cells = (r["figure"], r["text"], r["stated"], r["measured"], r["measured_over_stated"], r["why_they_differ"])
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Not measured again:", "", *(f"- {what}: {why}." for what, why in NOT_MEASURED)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--gsm8k", required=True)
    parser.add_argument("--agent", required=True)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--page", type=Path, required=True)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer, profile = AutoTokenizer.from_pretrained(args.model), Profile.load(args.profile)
    texts = {"gsm8k": args.gsm8k, "agent": args.agent}
    found = {name: measure(model, tokenizer, profile, text) for name, text in texts.items()}
    rows = [
        _row(f.what, name, stated, found[name][f.arm, f.far], f.arm, f.why)
        for f in FIGURES
        for name, stated in zip(texts, f.stated, strict=False)
    ]
    rows += canary_rows()
    write_csv(rows, args.csv)
    args.page.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
