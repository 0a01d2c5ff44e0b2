"""Is an interrupted run the same run? 600 tokens in one go, and 300 + 300 with a new process in between.

    python benchmarks/restart.py --model MODEL --profile tuned.profile --text traces.jsonl

The cache and the controller's state are saved after half of the tokens, and loaded by another process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from report import write_csv
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamina import Controller, ControllerConfig, LaminaCache, Profile
from lamina.basis.text import load_documents
from lamina.engines.hf import cache_kwarg

PROMPT = 1200


@torch.no_grad()
def greedy(model: Any, cache: Any, token: torch.Tensor, n: int) -> list[int]:
    """The next n tokens after ``token``, which the cache does not hold yet."""
    out = []
    for _ in range(n):
        token = model(token, use_cache=True, **cache_kwarg(model, cache)).logits[:, -1:].argmax(-1)
        out.append(int(token))
    return out


def main() -> None:
    """Run both and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--resume", type=Path, help="folder of a half-finished run: finish it (used by the benchmark)")
    args = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    profile = Profile.load(args.profile)
    config = ControllerConfig(policy="hysteresis", tau0=2e-5, rate=1 / 16, schedule="bernoulli", patience=2, dwell=1)  # type: ignore[arg-type]
    half, heard = args.tokens // 2, []
    if args.resume:
        state = json.loads((args.resume / "state.json").read_text())
        controller = Controller(
            config, [(2, 2)] * len(profile.packed), weights=profile.tuning and profile.tuning.weights
        )
        controller.load(state["controller"])
        cache = LaminaCache.load(args.resume / "cache", model, profile, controller=controller)
        cache.control.on_firing = lambda f: heard.append([f.step, f.tiers])  # type: ignore[union-attr]
        out = greedy(model, cache, torch.tensor([[state["token"]]]), half)
        (args.resume / "rest.json").write_text(json.dumps([out, heard]))
        return
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = tokenizer(load_documents(args.text)[0], return_tensors="pt").input_ids[:, :PROMPT]

    def start() -> LaminaCache:
        cache = LaminaCache(model, profile, controller=config)
        cache.control.on_firing = lambda f: heard.append([f.step, f.tiers])  # type: ignore[union-attr]
        with torch.no_grad():
            model(ids[:, :-1], use_cache=True, **cache_kwarg(model, cache))
        return cache

    whole = greedy(model, start(), ids[:, -1:], 2 * half)
    expected = json.loads(json.dumps(heard))
    heard.clear()
    cache = start()
    first = greedy(model, cache, ids[:, -1:], half)
    with tempfile.TemporaryDirectory() as folder:
        cache.save(Path(folder) / "cache")
        assert cache.controller is not None
        state = {"token": first[-1], "controller": cache.controller.snapshot()}
        (Path(folder) / "state.json").write_text(json.dumps(state))
        subprocess.run([sys.executable, *sys.argv, "--resume", folder], check=True)
        rest, later = json.loads((Path(folder) / "rest.json").read_text())
    decisions = json.loads(json.dumps(heard)) + later
    same = sum(a == b for a, b in zip(whole, first + rest))
    changes = sum(a[1] != b[1] for a, b in pairwise(expected))
    row = {
        "prompt": PROMPT, "tokens": len(whole), "equal_tokens": same, "firings": len(expected),
        "equal_decisions": sum(a == b for a, b in zip(expected, decisions)), "firings_that_changed_tiers": changes,
        "distinct_tokens": len(set(whole)),
    }  # fmt: skip
    print(row)
    if args.csv:
        write_csv([row], args.csv)


if __name__ == "__main__":
    main()
