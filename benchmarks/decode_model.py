"""How fast does a whole model decode, against 16-bit attention, and how many sequences fit?

    python benchmarks/decode_model.py --csv benchmarks/results/decode_model.csv

Models of real shapes with random weights in bfloat16; every step runs in a CUDA graph. ``bf16`` keeps keys and values
in tensors of exactly the context's length, read by the fastest of torch's backends: no cache of an engine is faster.
The caches hold random rows; with Lamina they are encoded like any others. ``measured`` is a step at which the
controller looks.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from decode_attention import BACKENDS, graphed
from report import write_csv
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import sdpa_mask
from triton.testing import do_bench

from lamina import LaminaCache, Profile
from lamina.basis.geometry import model_geometry
from lamina.basis.profile import LayerProfile
from lamina.basis.transforms import LayerTransform
from lamina.control.config import ControllerConfig
from lamina.engines.hf import cache_kwarg
from lamina.engines.hf_graph import DecodeGraph

GIB = 2**30
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-8B": (
        "Qwen3",
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    ),
    "Llama-3.1-8B": (
        "Llama",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
    ),
}  # fmt: skip
CHUNK = 8192


def random_model(name: str) -> Any:
    """A model on the GPU, nothing of it ever in the CPU's memory."""
    family, sizes = SHAPES[name]
    config = getattr(transformers, f"{family}Config")(
        **sizes, max_position_embeddings=2**20, tie_word_embeddings=False, dtype=torch.bfloat16
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"), transformers.initialization.no_init_weights():
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    torch.set_default_dtype(torch.float32)
    g = torch.Generator("cuda").manual_seed(0)
    for p in model.parameters():
        p.data.fill_(1.0) if p.dim() == 1 else p.data.normal_(0, 0.02, generator=g)
    return model.eval()


def random_profile(model: Any) -> Profile:
    """Random rotations."""
    geometry = model_geometry(model.config)
    g = torch.Generator().manual_seed(0)
    layers: list[LayerProfile | None] = []
    for layer in geometry.layers:
        h, d = layer.n_kv_heads, layer.head_dim
        r = torch.linalg.qr(torch.randn(2, h, d, d, generator=g))[0]
        transform = LayerTransform(r[0], r[0], r[1], torch.zeros(h, d))
        layers.append(LayerProfile(transform, torch.full((h, 3, 3), 0.1), torch.ones(h), torch.ones(h)))
    return Profile(layers, "random", geometry.config_hash, "hadamard", [(2, 2)] * geometry.n_layers)


class ExactLayer(CacheLayerMixin):
    """Keys and values of a fixed number of tokens, the newest of which a step writes."""

    is_compileable = True
    is_sliding = False

    def __init__(self, batch: int, tokens: int, heads: int, dim: int) -> None:
        super().__init__()
        self.rows = torch.empty(2, batch, heads, tokens, dim, device="cuda", dtype=torch.bfloat16)
        for b in range(batch):
            self.rows[:, b].normal_()
        self.is_initialized = True

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing is left to do."""

    def update(self, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the newest rows."""
        self.rows[0, :, :, -1:], self.rows[1, :, :, -1:] = k, v
        return self.rows[0], self.rows[1]

    def get_seq_length(self) -> int:
        """Tokens before the step."""
        return self.rows.shape[3] - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys."""
        return self.rows.shape[3], 0

    def get_max_length(self) -> int:
        """Tokens there is room for."""
        return self.rows.shape[3]

    get_max_cache_shape = get_max_length


def exact_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
    """Attention of one token over all keys."""
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


AttentionInterface.register("exact", exact_attention)
AttentionMaskInterface.register("exact", sdpa_mask)


@torch.no_grad()
def exact_ms(model: Any, batch: int, context: int) -> tuple[float, str, int]:
    """Milliseconds of a step, backend, and bytes of the cache."""
    config = model.config
    heads, dim = config.num_key_value_heads, config.head_dim
    layers = [ExactLayer(batch, context, heads, dim) for _ in range(config.num_hidden_layers)]
    cache = Cache(layers=layers)
    n_bytes = sum(layer.rows.nbytes for layer in layers)
    model.set_attn_implementation("exact")
    tokens = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
    positions = torch.full((batch, 1), context - 1, dtype=torch.long, device="cuda")
    step = partial(model, input_ids=tokens, position_ids=positions, use_cache=True, **cache_kwarg(model, cache))
    found = {}
    for name in ("flash", "cudnn"):
        try:
            with sdpa_kernel(BACKENDS[name]):
                found[name] = float(do_bench(graphed(step), warmup=30, rep=200, return_mode="median"))
        except RuntimeError as error:
            print(f"  {name}: {str(error).splitlines()[0][:100]}")
    best = min(found, key=found.__getitem__)
    return found[best], best, n_bytes


@torch.no_grad()
def filled_cache(model: Any, batch: int, context: int, tiers: int, live: bool) -> LaminaCache:
    """A cache of random rows, one token short of the context."""
    controller = ControllerConfig(rate=1e-6) if live else None
    cache = LaminaCache(model, random_profile(model), tiers=tiers, controller=controller)
    g = torch.Generator("cuda").manual_seed(1)
    for layer in cache.ours:
        layer.make_store(torch.bfloat16, torch.device("cuda"))
        store, h, d = layer.store, layer.store.layout.n_heads, layer.store.layout.head_dim
        n = -(-context // 64) * batch
        store.holds_storage = True
        layer.store.arena.reserve(n + batch, n * (0, 2, 6)[tiers.bit_length() - 2], 8 * batch)
        for start in range(0, context - 1, CHUNK):
            size = min(CHUNK, context - 1 - start)
            for_all = torch.randn(2, 1, h, size, d, device="cuda", dtype=torch.bfloat16, generator=g)
            store.append(*for_all.expand(2, batch, h, size, d))
        store.holds_storage = False
        store.settle()
        layer.seen = context - 1
    return cache


@torch.no_grad()
def lamina_ms(model: Any, batch: int, context: int, tiers: int, live: bool) -> dict[str, float]:
    """Milliseconds of a step, of one at which the controller looks, of a step with its books; bytes of the cache."""
    began = time.time()
    cache = filled_cache(model, batch, context, tiers, live)
    torch.cuda.synchronize()
    found = {"bytes": float(sum(cache.memory().values())), "fill_s": time.time() - began}
    tokens = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
    with DecodeGraph(model, cache) as graph:
        step = partial(model, input_ids=tokens, **cache_kwarg(model, cache))
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        began, n = time.time(), 128
        for _ in range(n):
            step()
        torch.cuda.synchronize()
        found["wall"] = 1e3 * (time.time() - began) / n
        lengths = graph._lengths.clone()

        def again(measured: bool) -> None:
            # A step over and over: the same row is written.
            graph._lengths.copy_(lengths)
            graph._replay(measured)

        for name, measured in (("ms", False), ("measured", True))[: 1 + live]:
            found[name] = float(do_bench(partial(again, measured), warmup=30, rep=200, return_mode="median"))
    return found


def main() -> None:
    """Time the cases that are asked for and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--model", action="append", choices=list(SHAPES))
    parser.add_argument("--gib", type=float, default=100, help="memory of weights and cache for the largest batch")
    parser.add_argument("--case", action="append", choices=["long", "batch"])
    args = parser.parse_args()
    table: list[dict[str, Any]] = []

    def add(name: str, case: str, batch: int, context: int, tiers: str, ms: float, n_bytes: float, **more: Any) -> None:
        row = {
            "model": name, "case": case, "batch": batch, "context": context, "tiers": tiers, "ms": f"{ms:.3f}",
            "tokens_per_s": f"{1e3 * batch / ms:.1f}", "cache_gib": f"{n_bytes / GIB:.2f}",
            **{k: more.get(k, "") for k in ("backend", "wall_ms", "measured_ms", "canary_share", "fill_s")},
        }  # fmt: skip
        table.append(row)
        print(" ".join(f"{k}={v}" for k, v in row.items() if v != ""), flush=True)
        write_csv(table, args.csv)

    def ours(model: Any, name: str, case: str, batch: int, context: int, tiers: int, live: bool) -> None:
        found = lamina_ms(model, batch, context, tiers, live)
        more = {"wall_ms": f"{found['wall']:.3f}", "fill_s": f"{found['fill_s']:.1f}"}
        if live:
            extra = found["measured"] - found["ms"]
            more |= {"measured_ms": f"{found['measured']:.3f}", "canary_share": f"{extra / 64 / found['ms']:.5f}"}
        add(name, case, batch, context, str(tiers), found["ms"], found["bytes"], **more)
        torch.cuda.empty_cache()

    for name in args.model or list(SHAPES):
        model = random_model(name)
        weights = sum(p.nbytes for p in model.parameters())
        if "long" in (args.case or ["long"]):
            ms, backend, n_bytes = exact_ms(model, 1, 102400)
            add(name, "long", 1, 102400, "bf16", ms, n_bytes, backend=backend)
            torch.cuda.empty_cache()
            for tiers in (2, 4):
                ours(model, name, "long", 1, 102400, tiers, tiers == 2)
        if "batch" in (args.case or ["batch"]):
            room = args.gib * 1e9 - weights
            one = exact_ms(model, 1, 32768)[2]
            batch = int(room // one)
            ms, backend, n_bytes = exact_ms(model, batch, 32768)
            add(name, "batch", batch, 32768, "bf16", ms, n_bytes, backend=backend)
            torch.cuda.empty_cache()
            ours(model, name, "batch", 8, 32768, 2, True)
            one = lamina_bytes(model, 2)
            batch = int(room // one)
            ours(model, name, "batch", batch, 32768, 2, True)
        del model
        torch.cuda.empty_cache()


def lamina_bytes(model: Any, tiers: int) -> float:
    """Bytes of a sequence of 32k tokens, of two of them the second."""
    sizes = []
    for batch in (1, 2):
        cache = filled_cache(model, batch, 32768, tiers, False)
        sizes.append(sum(cache.memory().values()))
    return float(sizes[1] - sizes[0])


if __name__ == "__main__":
    main()
