"""Do all ranks of tensor parallelism take the same decisions, and are answers those of one GPU?

    python benchmarks/serve_ranks.py --ranks 2 --steps 2000 --csv serve_ranks.csv

A Llama of random weights in float32 (in bfloat16 ties of logits would decide), greedy. First the answers to 8 prompts
of 5 to 1,500 tokens at 8 bits, by one worker and by all ranks. Then all prompts again for ``--steps`` tokens with a
live controller and an arena that is too small for its tiers; at the end every rank tells its tiers, signals, planes
shed, and a hash of its page tables, slots and exact rows included.
"""

import argparse
import csv
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

LENGTHS = (5, 63, 64, 65, 130, 300, 700, 1500)
COLUMNS = (
    "date", "commit", "machine", "vllm", "torch", "ranks", "layers", "steps", "seconds", "same_answers", "prompts",
    "ranks_alike", "firings", "tier_changes", "planes_shed", "bits_history", "non_finite",
)  # fmt: skip
TOLD = (
    "tiers", "signals", "planes_shed", "firings", "tier_changes", "arena_used", "exact_used", "non_finite",
    "bits_history",
)  # fmt: skip


def make_model(folder: Path, small: bool) -> None:
    """Write a random Llama and a profile of Hadamard rotations."""
    from serve_vllm import hadamard_profile
    from transformers import LlamaConfig, LlamaForCausalLM

    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size",
    )  # fmt: skip
    sizes: Any = (128, 256, 2, 4, 2, 32, 1000) if small else (2048, 4096, 8, 32, 8, 128, 32000)
    config = LlamaConfig(**dict(zip(names, sizes)), max_position_embeddings=8192, tie_word_embeddings=False)
    torch.manual_seed(0)
    LlamaForCausalLM(config).float().save_pretrained(folder)
    hadamard_profile(config, folder / "model.profile")


def told_by(worker: Any) -> dict[str, Any]:
    """What one rank's books say."""
    stats = worker.lamina.stats()
    books = hashlib.sha256(worker.lamina.pages.cells.tobytes()).hexdigest()
    return {"books": books} | {name: stats.get(name) for name in TOLD}


def serve(folder: str, ranks: int, steps: int, arena_gb: float, result: str) -> None:
    """Run one engine, and write what it answered and its ranks told."""
    from vllm import LLM, SamplingParams

    vocab = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    g = torch.Generator().manual_seed(5)
    prompts = [{"prompt_token_ids": torch.randint(vocab, (n,), generator=g).tolist()} for n in LENGTHS]
    controlled = {"controller": {"target_bits": 4.0, "rate": 0.1}, "arena_gb": arena_gb}
    lamina = {"profile": f"{folder}/model.profile", "tiers": 8}
    lamina |= controlled if steps else {"deterministic": True}
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
    on_gpu: dict[str, Any] = {"attention_backend": "CUSTOM", "compilation_config": graphs}
    llm = LLM(
        model=folder, skip_tokenizer_init=True, dtype="float32", block_size=64, max_model_len=4096, max_num_seqs=8,
        max_num_batched_tokens=4096, enable_prefix_caching=False, tensor_parallel_size=ranks, seed=0,
        kv_cache_memory_bytes=(6 << 30) if torch.cuda.is_available() else (200 << 20), disable_custom_all_reduce=True,
        additional_config={"lamina": lamina}, **(on_gpu if torch.cuda.is_available() else {"enforce_eager": True}),
    )  # fmt: skip

    def answers(tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]

    if steps:
        llm.collective_rpc("lamina_freeze", args=(True,))
        llm.collective_rpc("lamina_set_tiers", args=(8,))
    found: dict[str, Any] = {"answers": answers(32)}
    if steps:
        llm.collective_rpc("lamina_freeze", args=(False,))
        began = time.perf_counter()
        answers(steps)
        found |= {"seconds": time.perf_counter() - began, "ranks": llm.collective_rpc(told_by)}
    Path(result).write_text(json.dumps(found))


def main() -> None:
    """Run both engines, one after the other, and print what they say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--small", action="store_true", help="a tiny model, as for a CPU")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--commit", help="default what git says here")
    args = parser.parse_args()
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "HF_HUB_OFFLINE": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args.small)
        arena, found = 0.0002 if args.small else 0.03, []
        for ranks, steps in ((1, 0), (args.ranks, args.steps)):
            result = f"{folder}/{ranks}.json"
            # An engine leaves things behind in its process.
            given = folder, ranks, steps, arena, result
            process = multiprocessing.get_context("spawn").Process(target=serve, args=given)
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"the engine of {ranks} ranks ended with status {process.exitcode}")
            found.append(json.loads(Path(result).read_text()))
    one, all_ranks = found
    import vllm
    from report import environment

    told = all_ranks["ranks"]
    row = {
        "date": datetime.now(UTC).date().isoformat(), "commit": args.commit or environment()["commit"],
        "machine": environment()["device"], "vllm": vllm.__version__, "torch": torch.__version__, "ranks": args.ranks,
        "layers": len(told[0]["tiers"]), "steps": args.steps, "seconds": f"{all_ranks['seconds']:.1f}",
        "same_answers": sum(a == b for a, b in zip(one["answers"], all_ranks["answers"])), "prompts": len(LENGTHS),
        "ranks_alike": len({json.dumps(x, sort_keys=True) for x in told}) == 1,
        **{name: told[0][name] for name in COLUMNS[-5:]},
    }  # fmt: skip
    if args.csv:
        fresh = not args.csv.exists()
        with args.csv.open("a", newline="") as f:
            writer = csv.DictWriter(f, COLUMNS)
            if fresh:
                writer.writeheader()
            writer.writerow(row)
    print("\n".join(f"{name:14} {value}" for name, value in row.items()))
    if not row["ranks_alike"]:
        raise SystemExit(f"ranks differ: {told}")


if __name__ == "__main__":
    main()
