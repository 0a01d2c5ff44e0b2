"""Does a cache that is padded, copied, cropped, reordered or reused write what one that is not would write?

Greedy continuations of a real model, token for token; where they part, the largest difference between the two runs'
teacher-forced log-probabilities says whether a tie flipped or rows were mixed up.

    python benchmarks/life_cycle.py --model DIR --profile FILE --text FILE.jsonl
"""

import argparse
import copy
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import write_csv
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM

from lamina import LaminaCache, Profile, WindowConfig
from lamina.basis.text import load_documents
from lamina.engines.hf import cache_kwarg

NEW = 48


class Bench:
    """A model, its profile, real text, and what was found."""

    def __init__(self, folder: str, profile: Path, text: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.profile = Profile.load(profile)
        joined = "\n\n".join(load_documents(str(text)))[:20_000]
        self.ids = self.tokenizer(joined, return_tensors="pt").input_ids
        self.rows: list[dict[str, Any]] = []

    def cache(self, tiers: Any = 2, **kwargs: Any) -> LaminaCache:
        """A fresh cache."""
        return LaminaCache(self.model, self.profile, tiers=tiers, **kwargs)

    def generate(self, ids: Tensor, cache: Any, **kwargs: Any) -> Tensor:
        """New tokens only."""
        settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **kwargs}
        if "attention_mask" not in settings:
            settings["attention_mask"] = torch.ones_like(ids)
        return self.model.generate(ids, **settings, **cache_kwarg(self.model, cache))[:, ids.shape[1] :]

    def feed(self, ids: Tensor, cache: Any, **kwargs: Any) -> Tensor:
        """Logits of one forward pass."""
        return self.model(input_ids=ids, **kwargs, **cache_kwarg(self.model, cache)).logits

    def note(self, case: str, tiers: Any, got: Tensor, expected: Tensor, note: str = "") -> None:
        """Record how many tokens agree before the first difference."""
        same = int((got.flatten() == expected.flatten()).long().cumprod(0).sum())
        self.rows.append({"case": case, "tiers": str(tiers), "equal": same, "tokens": expected.numel(), "note": note})
        print(f"{case:58s} {tiers!s:8s} {same:4d} of {expected.numel()} equal  {note}", flush=True)


def padded(bench: Bench, tiers: Any) -> None:
    """A left-padded batch against each row alone."""
    lengths = (3, 40, 700)
    prompts = [bench.ids[:, 1000 * i : 1000 * i + n] for i, n in enumerate(lengths)]
    batch = torch.cat([torch.nn.functional.pad(p, (max(lengths) - p.shape[1], 0)) for p in prompts])
    mask = torch.stack([torch.arange(max(lengths)) >= max(lengths) - n for n in lengths]).long()
    cache = bench.cache(tiers)
    together = bench.generate(batch, cache, attention_mask=mask)
    stored = sum(cache.lengths)
    for prompt, n, row in zip(prompts, lengths, together):
        alone = bench.generate(prompt, bench.cache(tiers))
        bench.note(f"left-padded batch 3/40/700, row of {n}, against alone", tiers, row, alone)
    assert stored == sum(lengths) + 3 * (NEW - 1), "padding was stored"


def beams(bench: Bench, tiers: Any) -> None:
    """Beam search with pages shared between beams, against one that copies a cache a beam."""
    prompt = bench.ids[:, :500]
    out = bench.generate(prompt, bench.cache(tiers), num_beams=3, max_new_tokens=NEW)
    bench.note("beams 3 with a common prefix, against a copy a beam", tiers, out, beam_search(bench, prompt, tiers, 3))


def beam_search(bench: Bench, prompt: Tensor, tiers: Any, n: int) -> Tensor:
    """Plain beam search over independent caches, as transformers scores it (no length penalty within equal lengths)."""
    cache = bench.cache(tiers)
    logp = bench.feed(prompt, cache)[0, -1].log_softmax(-1)
    top = logp.topk(n)
    beams = [(float(s), [int(t)], copy.deepcopy(cache)) for s, t in zip(*top)]
    for _ in range(NEW - 1):
        options = []
        for b, (score, tokens, own) in enumerate(beams):
            logp = bench.feed(torch.tensor([[tokens[-1]]]), own)[0, -1].log_softmax(-1)
            options += [(score + float(s), b, int(t)) for s, t in zip(*logp.topk(2 * n))]
        best = sorted(options, reverse=True)[:n]
        beams = [(s, [*beams[b][1], t], copy.deepcopy(beams[b][2])) for s, b, t in best]
    return torch.tensor([max(beams)[1]])


def assisted(bench: Bench, tiers: Any) -> None:
    """Assisted decoding with the model itself and with a random model as draft, and prompt lookup."""
    prompt = bench.ids[:, :700]
    plain = bench.generate(prompt, bench.cache(tiers))
    good = copy.deepcopy(bench.model)
    good.set_attn_implementation("sdpa")
    torch.manual_seed(0)
    vocab = bench.model.config.vocab_size
    bad = LlamaForCausalLM(
        LlamaConfig(vocab_size=vocab, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1)
    ).eval()
    for name, draft in (("good", good), ("bad", bad)):
        out = bench.generate(prompt, bench.cache(tiers), assistant_model=draft)
        bench.note(f"assisted decoding, {name} draft", tiers, out, plain)
    for n in (3, 10):
        out = bench.generate(prompt, bench.cache(tiers), prompt_lookup_num_tokens=n)
        bench.note(f"prompt lookup, {n} tokens", tiers, out, plain)


def crops(bench: Bench, tiers: Any, **window: int) -> None:
    """Crop a cache of 700 tokens and continue, against a cache that never held more."""
    label = "" if not window else f", rollback {window['rollback']}"
    for keep in (1, 63, 64, 65, 130, 300, 660, 699):
        cache = bench.cache(tiers, window=WindowConfig(**window))
        bench.feed(bench.ids[:, :700], cache)
        cache.crop(keep)
        ids = bench.ids[:, : keep + 1]
        fresh = bench.cache(tiers, window=WindowConfig(**window))
        bench.feed(ids[:, :-1], fresh)
        probe = copy.deepcopy(cache), copy.deepcopy(fresh)
        out, expected = bench.generate(ids, cache), bench.generate(ids, fresh)
        feed = torch.cat([ids[:, -1:], expected[:, :-1]], 1)
        a, b = (torch.cat([bench.feed(feed[:, i : i + 1], c) for i in range(NEW)], 1).log_softmax(-1) for c in probe)
        kl = float((b.exp() * (b - a)).sum(-1).mean())
        bench.note(f"crop 700 to {keep}{label}", tiers, out, expected, f"teacher-forced KL {kl:.1e}")


def questions(bench: Bench, tiers: Any) -> None:
    """Several questions on one text, through snapshots, copies and a file."""
    text, asked = bench.ids[:, :700], [bench.ids[:, 2000:2030], bench.ids[:, 3000:3017]]
    fresh = []
    for q in asked:
        cache = bench.cache(tiers)
        bench.feed(text, cache)
        fresh.append(bench.generate(torch.cat([text, q], 1), cache))
    cache = bench.cache(tiers)
    bench.feed(text, cache)
    read, own = cache.snapshot(), copy.deepcopy(cache)
    with tempfile.TemporaryDirectory() as folder:
        cache.save(Path(folder) / "text.safetensors")
        loaded = LaminaCache.load(Path(folder) / "text.safetensors", bench.model, bench.profile)
    for i, (q, expected) in enumerate(zip(asked, fresh)):
        cache.restore(read)
        out = bench.generate(torch.cat([text, q], 1), cache)
        bench.note(f"question {i + 1} after restore", tiers, out, expected)
    for name, other in (("deepcopy", own), ("saved and loaded", loaded)):
        out = bench.generate(torch.cat([text, asked[1]], 1), other)
        bench.note(f"question 2 on a {name} cache", tiers, out, fresh[1])


def removed(bench: Bench, tiers: Any) -> None:
    """A row that leaves the batch, and one that joins it, in the middle of the run."""
    rows = torch.cat([bench.ids[:, i * 800 : i * 800 + 500] for i in range(3)])
    alone = [bench.generate(row[None], bench.cache(tiers)) for row in rows]
    cache = bench.cache(tiers)
    half = NEW // 2
    first = bench.generate(rows, cache, max_new_tokens=half)
    cache.select([0, 2])
    so_far = torch.cat([rows, first], 1)[[0, 2]]
    rest = bench.generate(so_far, cache, max_new_tokens=NEW - half)
    for i, row in enumerate((0, 2)):
        bench.note(f"row {row} after row 1 was removed", tiers, torch.cat([first[row], rest[i]]), alone[row])
    cache, joining = bench.cache(tiers), bench.cache(tiers)
    first = bench.generate(rows[:1], cache, max_new_tokens=half)
    bench.feed(rows[1:2], joining)
    joining.crop(-1)
    cache.add(joining)
    long = torch.cat([rows[:1], first], 1)
    short = torch.nn.functional.pad(rows[1:2], (long.shape[1] - rows.shape[1], 0))
    mask = torch.ones(2, long.shape[1], dtype=torch.long)
    mask[1, : long.shape[1] - rows.shape[1]] = 0
    rest = bench.generate(torch.cat([long, short]), cache, attention_mask=mask, max_new_tokens=NEW - half)
    bench.note("row 0 after another joined", tiers, torch.cat([first[0], rest[0]]), alone[0])
    other = bench.cache(tiers)
    bench.feed(rows[1:2], other)
    other.crop(-1)
    expected = bench.generate(rows[1:2], other, max_new_tokens=NEW - half)
    bench.note("the row that joined", tiers, rest[1], expected)


def sampled(bench: Bench, tiers: Any) -> None:
    """Sampling with a seed, with and without other rows and compilation."""
    prompt = bench.ids[:, :500]
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append(bench.generate(prompt, bench.cache(tiers), do_sample=True))
    bench.note("sampling twice with one seed", tiers, runs[0], runs[1])


CASES: tuple[Callable[[Bench, Any], None], ...] = (padded, beams, assisted, crops, questions, removed, sampled)


@torch.no_grad()
def main() -> None:
    """Run every case at every tier, print and write a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "life_cycle.csv")
    args = parser.parse_args()
    bench = Bench(args.model, args.profile, args.text)
    start = time.perf_counter()
    for tiers in (2, (4, 2), 8):
        for case in CASES:
            case(bench, tiers)
    crops(bench, 2, rollback=640)
    dynamic = bench.generate(bench.ids[:, :100], DynamicCache(config=bench.model.config))
    bench.note("100 tokens against DynamicCache", 2, bench.generate(bench.ids[:, :100], bench.cache()), dynamic)
    write_csv(bench.rows, args.csv)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
