"""A long generation under a byte limit: is it ever above, does it fail, and what is shed?

    python benchmarks/budget_run.py --model MODEL --profile P --text traces.jsonl --share 0.7

The limit is a share of what INT4 everywhere would take at the end, windows and tables included. Planes go first, exact
rows last; base planes and open pages stay, so a share below theirs cannot be met, and the benchmark says where that is.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from report import write_csv
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamina import ControllerConfig, LaminaCache, Profile
from lamina.basis.text import load_documents
from lamina.engines.hf import cache_kwarg
from lamina.errors import MemoryBudgetError


@torch.no_grad()
def bytes_at(model: Any, profile: Profile, ids: torch.Tensor, tiers: int) -> int:
    """Bytes of a cache of fixed tiers."""
    cache = LaminaCache(model, profile, tiers=tiers)
    for chunk in ids.split(512, 1):
        model(chunk, use_cache=True, logits_to_keep=1, **cache_kwarg(model, cache))
    return sum(cache.memory().values())


@torch.no_grad()
def main() -> None:
    """Generate token by token and look at the bytes after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=6144)
    parser.add_argument("--share", type=float, action="append", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--csv", type=Path, required=True)
    args = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = tokenizer("\n\n".join(load_documents(args.text)), return_tensors="pt").input_ids[:, : args.tokens]
    profile = Profile.load(args.profile)
    need = {bits: bytes_at(model, profile, ids, bits) for bits in (2, 4)}
    table = []
    for share in args.share:
        limit = int(share * need[4])
        config = ControllerConfig(policy="allocate", target_bits=4.0)  # type: ignore[arg-type]
        cache = LaminaCache(model, profile, tiers=4, max_bytes=limit, controller=config)
        shed: list[dict[str, Any]] = []
        cache.listeners.append(lambda event, shed=shed: shed.append(event) if event["event"] == "shed" else None)
        start, most, outcome = time.perf_counter(), 0, "finished"
        token = ids[:, : args.prompt]
        try:
            while cache.get_seq_length() < args.tokens:
                logits = model(token, use_cache=True, logits_to_keep=1, **cache_kwarg(model, cache)).logits
                most = max(most, sum(cache.memory().values()))
                token = logits[:, -1:].float().softmax(-1)[:, 0].multinomial(1)
        except MemoryBudgetError as error:
            outcome = f"refused at {cache.get_seq_length()} tokens: {error}"
        row = {
            "share": share, "max_bytes": limit, "int4_bytes": need[4], "int2_bytes": need[2],
            "int2_share": f"{need[2] / need[4]:.3f}", "tokens": cache.get_seq_length(), "most_bytes": most,
            "over": most > limit, "planes_shed": cache.pager.planes_shed,
            "to_4_bits": sum(e["bits"] == 4 for e in shed), "to_2_bits": sum(e["bits"] == 2 for e in shed),
            "exact_shed": cache.pager.exact_shed,
            "k_planes": sum(e["side"] == "k" for e in shed), "v_planes": sum(e["side"] == "v" for e in shed),
            "bits_history": f"{cache.bits()['history']:.3f}", "seconds": f"{time.perf_counter() - start:.0f}",
            "outcome": outcome,
        }  # fmt: skip
        print(row, flush=True)
        table.append(row)
    write_csv(table, args.csv)


if __name__ == "__main__":
    main()
