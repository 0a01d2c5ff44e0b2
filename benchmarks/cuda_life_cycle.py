"""The life of a cache on a GPU, and on a model spread over GPU and CPU: each case against the same run without it.

python benchmarks/cuda_life_cycle.py
"""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import write_csv
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lamina import LaminaCache, Profile, calibrate
from lamina.engines.hf import cache_kwarg

VOCAB = 1000


class Case:
    """A model on some device with a profile; logits of whatever is fed."""

    def __init__(self, model: Any, profile: Profile, device: str) -> None:
        self.model, self.profile, self.device = model, profile, device

    def cache(self) -> LaminaCache:
        """A fresh cache at 2 bits."""
        return LaminaCache(self.model, self.profile, tiers=2)

    def feed(self, ids: Tensor, cache: Any, mask: Tensor | None = None) -> Tensor:
        """Log-probabilities ``[B, T, vocab]`` of one call."""
        kwargs: dict[str, Any] = {}
        if mask is not None:
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            kwargs = {"attention_mask": mask, "position_ids": positions}
        logits = self.model(ids.to(self.device), **kwargs, **cache_kwarg(self.model, cache)).logits
        return logits.float().log_softmax(-1).cpu()

    def decode(self, ids: Tensor, start: int, cache: Any, mask: Tensor | None = None) -> Tensor:
        """Feed ``ids`` from ``start`` token by token."""
        steps = range(start, ids.shape[1])
        return torch.cat(
            [self.feed(ids[:, t : t + 1], cache, None if mask is None else mask[:, : t + 1]) for t in steps], 1
        )


def tokens(batch: int, n: int, seed: int = 0) -> Tensor:
    """Random tokens."""
    return torch.randint(1, VOCAB, (batch, n), generator=torch.Generator().manual_seed(seed))


def padded(case: Case) -> float:
    """Three rows of different lengths against each alone."""
    ids, lengths = tokens(3, 760), (40, 400, 760)
    mask = torch.stack([torch.arange(760) >= 760 - n for n in lengths]).long().to(case.device)
    cache = case.cache()
    case.feed(ids[:, :700], cache, mask[:, :700])
    together = case.decode(ids, 700, cache, mask)
    worst = 0.0
    for b, n in enumerate(lengths):
        row, own = ids[b : b + 1, 760 - n :], case.cache()
        if n > 60:
            case.feed(row[:, :-60], own)
        alone = case.decode(row, max(0, n - 60), own)
        worst = max(worst, float((together[b, -alone.shape[1] :] - alone[0]).abs().max()))
    return worst


def reordered(case: Case) -> float:
    """Rows repeated and reordered as beams are, against runs of their own."""
    ids = tokens(2, 760)
    cache = case.cache()
    case.feed(ids[:, :700], cache)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1, 2]).to(case.device))
    order, tails = [1, 0, 0, 1], tokens(4, 60, seed=1)
    got = case.decode(tails, 0, cache)
    worst = 0.0
    for b, row in enumerate(order):
        own = case.cache()
        case.feed(ids[row : row + 1, :700], own)
        worst = max(worst, float((got[b] - case.decode(tails[b : b + 1], 0, own)[0]).abs().max()))
    return worst


def rolled_back(case: Case) -> float:
    """Draft tokens, rejected over page borders, against never having drafted."""
    ids, drafts = tokens(1, 800), tokens(1, 700, seed=2)
    cache, plain = case.cache(), case.cache()
    worst = 0.0
    for c in (cache, plain):
        case.feed(ids[:, :600], c)
    for t in range(600, 800, 5):
        n = (t * 7) % 60 + 1
        case.feed(drafts[:, :n], cache)
        cache.crop(-n)
        a, b = (case.feed(ids[:, t : t + 5], c) for c in (cache, plain))
        worst = max(worst, float((a - b).abs().max()))
    return worst


def restored(case: Case) -> float:
    """The same question after restore, on a copy, and on a saved and loaded cache."""
    ids, question = tokens(1, 700), tokens(1, 90, seed=3)
    cache = case.cache()
    case.feed(ids, cache)
    read, copied = cache.snapshot(), copy.deepcopy(cache)
    with tempfile.TemporaryDirectory() as folder:
        cache.save(Path(folder) / "c")
        loaded = LaminaCache.load(Path(folder) / "c", case.model, case.profile)
    answers = [case.decode(question, 0, cache)]
    cache.restore(read)
    answers += [case.decode(question, 0, c) for c in (cache, copied, loaded)]
    return max(float((a - answers[0]).abs().max()) for a in answers)


def joined(case: Case) -> float:
    """A row that leaves and one that joins."""
    ids = tokens(3, 700)
    cache, joining = case.cache(), case.cache()
    case.feed(ids[:2, :600], cache)
    case.feed(ids[2:, :500], joining)
    cache.select([1])
    cache.add(joining)
    tails = tokens(2, 60, seed=4)
    mask = torch.ones(2, 660, dtype=torch.long, device=case.device)
    mask[1, :100] = 0
    got = torch.cat([case.feed(tails[:, t : t + 1], cache, mask[:, : 601 + t]) for t in range(60)], 1)
    worst = 0.0
    for b, (row, n) in enumerate(((1, 600), (2, 500))):
        own = case.cache()
        case.feed(ids[row : row + 1, :n], own)
        worst = max(worst, float((got[b] - case.decode(tails[b : b + 1], 0, own)[0]).abs().max()))
    return worst


CASES: tuple[Callable[[Case], float], ...] = (padded, reordered, rolled_back, restored, joined)


def make(dtype: torch.dtype) -> Any:
    """A random Llama."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, vocab_size=VOCAB,
        intermediate_size=1024, max_position_embeddings=4096, initializer_range=0.05,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


@torch.no_grad()
def main() -> None:
    """Every case in two dtypes on one device, and in one spread over two."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    profile = calibrate(make(torch.float32).to(device), [tokens(1, 1024, seed=s) for s in range(10, 20)])
    for dtype, spread in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)):
        model = make(dtype)
        if spread:
            from accelerate import dispatch_model

            places = {"model.embed_tokens": device, "model.rotary_emb": device, "model.norm": "cpu", "lm_head": device}
            places |= {f"model.layers.{i}": device if i % 2 else "cpu" for i in range(4)}
            model = dispatch_model(model, places, main_device=device, force_hooks=True)
        else:
            model.to(device)
        for case in CASES:
            found = case(Case(model, profile, device))
            row = {"case": case.__name__, "dtype": str(dtype).removeprefix("torch."), "spread": spread}
            rows.append(row | {"max_logprob_difference": f"{found:.2e}"})
            print(rows[-1], flush=True)
    write_csv(rows, Path(__file__).parent / "results" / "cuda_life_cycle.csv")


if __name__ == "__main__":
    main()
