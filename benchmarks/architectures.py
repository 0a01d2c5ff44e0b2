"""What does Lamina do with a tiny random model of each architecture, and what does it cost in accuracy?

Sequences of 400 random tokens are fed in chunks and single tokens to transformers' eager attention with its own cache,
and to Lamina: with windows that hold all of the first 150 tokens, and with all pages packed but the first and the one
being filled. Random weights of this size say which architectures are read rightly, not how well a trained model fares.

    python benchmarks/architectures.py --csv benchmarks/results/architectures.csv
"""

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numba
import torch
import transformers
from report import write_csv
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from architectures import ARCHITECTURES, Architecture
from lamina.basis.calibrate import calibrate
from lamina.engines.hf import ATTENTION, LaminaCache, cache_kwarg
from lamina.errors import LaminaError
from lamina.pages import WindowConfig
from tiny_models import tokens

EXACT_CUTS = [100, 130, *range(131, 150)]
PACKED_CUTS = [200, 270, *range(271, 400)]
SHORT = WindowConfig(sink=64, recent=0, rollback=0)
FIELDS = (
    "architecture", "verdict", "packed_layers", "host_layers", "head_dims", "extras", "max_logit_error_exact_windows",
    "mean_kl_int8", "mean_kl_int2", "note",
)  # fmt: skip


@torch.no_grad()
def fed(model: PreTrainedModel, cache: Cache, ids: Tensor, cuts: list[int]) -> Tensor:
    """Logits of sequences that are fed in pieces."""
    model.set_attn_implementation(ATTENTION if isinstance(cache, LaminaCache) else "eager")
    caches, spans = cache_kwarg(model, cache), pairwise([0, *cuts, ids.shape[1]])
    return torch.cat([model(input_ids=ids[:, a:b], **caches).logits for a, b in spans], 1)


def mean_kl(ours: Tensor, exact: Tensor) -> float:
    """Mean KL of next-token distributions, in nats."""
    p, q = exact.double().log_softmax(-1), ours.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def measured(architecture: Architecture) -> dict[str, Any]:
    """Layers and errors of one architecture, or why it is not served."""
    if architecture.missing:
        return {"note": architecture.missing}
    model, ids = architecture.build(), tokens(1, 400)
    try:
        profile = calibrate(model, [tokens(2, 256, seed) for seed in (100, 101)])
        cache = LaminaCache(model, profile, tiers=2)
        ours = fed(model, cache, ids[:, :150], EXACT_CUTS)
    except LaminaError as error:
        return {"note": str(error)}
    exact = fed(model, DynamicCache(config=model.config), ids[:, :150], EXACT_CUTS)
    packed = cache.geometry.packed
    found = {
        "packed_layers": len(packed),
        "host_layers": len(cache.hosts),
        "head_dims": " ".join(str(dim) for dim in sorted({g.head_dim for g in packed.values()})),
        "max_logit_error_exact_windows": f"{float((ours - exact).abs().max()):.1e}",
    }
    exact = fed(model, DynamicCache(config=model.config), ids, PACKED_CUTS)[:, 200:]
    for bits in (8, 2):
        ours = fed(model, LaminaCache(model, profile, tiers=bits, window=SHORT), ids, PACKED_CUTS)[:, 200:]
        found[f"mean_kl_int{bits}"] = f"{mean_kl(ours, exact):.1e}"
    return found


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    rows = []
    for a in ARCHITECTURES:
        row = {"architecture": a.name, "verdict": str(a.verdict), "extras": a.extras} | measured(a)
        rows.append({name: row.get(name, "") for name in FIELDS})
        print("  ".join(f"{value}" for value in rows[-1].values() if value != ""), flush=True)
    if args.csv:
        write_csv(rows, args.csv)


if __name__ == "__main__":
    main()
