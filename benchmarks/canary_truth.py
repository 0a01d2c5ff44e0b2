"""Do the canaries tell the truth? Each layer's predicted drift against the drift of its whole attention.

The truth, by layer: for K the KL of the attention distribution read from packed pages, windows exact, against exact
attention; for V the relative squared error of the output when V alone is read from packed pages. Both averaged over the
same decode steps as the canaries, which see what a running cache would show them.

    python benchmarks/canary_truth.py --model DIR --profile FILE --text FILE --seq-len 1500 --json OUT
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamina import CodecConfig, Profile, WindowConfig
from lamina.attention.cpu import attend_cpu
from lamina.attention.reading import V, read_pages
from lamina.attention.types import ReadBasis
from lamina.basis.encoder import PageEncoder, measure_kappa
from lamina.basis.moments import MomentAccumulator
from lamina.basis.profile import LayerProfile, energies
from lamina.basis.text import load_documents
from lamina.basis.transforms import make_transform
from lamina.codec import TIERS
from lamina.codec.gaussian import gaussian_rows
from lamina.control.canary import anchored, ring
from lamina.control.live import RING_TOKENS
from lamina.engines.hf_settings import layer_scaling
from lamina.eval.drift import attention_drift
from lamina.eval.layer_drift import LayerRows, record_rows
from lamina.pages import Budget, EncodingWriter, LayerStore
from lamina.pages.table import EXACT, START, TIER

QUERIES = 32
SPARSE_LAYERS, SPARSE_GROUPS, SPARSE_HEADS, SPARSE_QUERIES = 8, 3, 16, 4


def store_of(rows: LayerRows, encoder: PageEncoder, bits: tuple[int, int]) -> LayerStore:
    """All rows of a layer in pages of one tier, as a cache with a controller keeps them."""
    heads, _, dim = rows.keys.shape
    store = LayerStore(
        heads, dim, rows.keys.dtype, "cpu", window=WindowConfig(), writer=EncodingWriter(encoder), tiers=lambda: bits,
        budget=Budget(),
    )  # fmt: skip
    store.append(rows.keys[None], rows.values[None])
    return store


def output_error(q: Tensor, rows: LayerRows, store: LayerStore, basis: ReadBasis) -> Tensor:
    """Relative squared error ``[Hq, n]`` of the output when V alone is read from packed pages."""
    view = store.view()
    heads, length, _ = rows.keys.shape
    n = q.shape[1]
    x = (q.double().unflatten(0, (heads, -1)) * basis.scaling) @ rows.keys.double()[:, None].mT
    position = torch.arange(length - n, length)[:, None]
    p = x.masked_fill(torch.arange(length) > position, float("-inf")).softmax(-1)
    error = torch.zeros(heads, p.shape[1], n, rows.keys.shape[-1], dtype=torch.float64)
    for page in view.page_ids[0].tolist():
        row = view.table[page].tolist()
        start = row[START]
        if row[TIER] == 0:
            continue
        v, _ = read_pages(view, torch.tensor([page]), V, torch.float64)
        v = v[0] @ basis.v_back.double().mT + basis.mean_v.double()[:, None]
        v -= rows.values[:, start : start + 64].double()
        recent = position // 64 * 64 - view.window.recent
        packed = ~((start < view.window.sink) | ((start >= recent) & (row[EXACT] >= 0)))
        error += torch.where(packed, p[..., start : start + 64], 0.0) @ v[:, None]
    out = p @ rows.values.double()[:, None]
    return (error.square().sum(-1) / out.square().sum(-1)).flatten(0, 1)


def one_layer(rows: LayerRows, profile: Any, scaling: float) -> dict[str, dict[str, float]]:
    """Truth and canaries of one layer, means over query heads and steps."""
    encoder = PageEncoder(profile, CodecConfig(), scaling, "cpu")
    rows_of_codec = gaussian_rows(encoder.codec, rows.keys.shape[-1])
    basis = ReadBasis(
        encoder.q_forward, encoder.v_back, encoder.mean_v, encoder.kappa, scaling, rows=rows_of_codec
    )  # fmt: skip
    found: dict[str, dict[str, list[float]]] = {"truth": {}, "anchored": {}, "ring": {}}
    store = store_of(rows, encoder, (2, 2))
    n = rows.queries.shape[1]
    length = rows.keys.shape[1]
    for bits in (2, 4):
        fresh = store if bits == 2 else store_of(rows, encoder, (bits, bits))
        found["truth"][f"k{bits}"] = [float(attention_drift(rows.queries, rows.keys, fresh.view(), basis).mean())]
        found["truth"][f"v{bits}"] = [float(output_error(rows.queries, rows, fresh, basis).mean())]
    result = attend_cpu(rows.queries[None], store.view(), basis)
    assert result.spread is not None
    for t in range(n):
        q = rows.queries[:, t]
        k, v = anchored(result.spread[0, :, t], result.out[0, t], rows_of_codec)
        end = length - n + t + 1
        r = ring(q, rows.keys[:, end - RING_TOKENS : end], scaling=scaling, quantise=encoder.requantise_page)
        for bits in TIERS:
            found["anchored"].setdefault(f"k{bits}", []).append(float(k[bits].mean()))
            found["anchored"].setdefault(f"v{bits}", []).append(float(v[bits].mean()))
            found["ring"].setdefault(f"k{bits}", []).append(float(r[bits].mean()))
    return {kind: {name: statistics.fmean(x) for name, x in values.items()} for kind, values in found.items()}


def correlation(a: list[float], b: list[float]) -> float:
    """Of logarithms."""
    return float(np.corrcoef(np.log(np.maximum(a, 1e-12)), np.log(np.maximum(b, 1e-12)))[0, 1])


def summary(layers: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Correlations over layers, and the median ratio to the truth."""
    answer: dict[str, dict[str, float]] = {}
    for kind in ("anchored", "ring"):
        answer[kind] = {}
        for name in ("k2", "k4", "v2", "v4"):
            truth = [x["truth"][name] for x in layers]
            # The ring measures keys alone, and speaks for values too.
            said = [x[kind].get(name, x[kind]["k" + name[1:]]) for x in layers]
            answer[kind][name] = correlation(said, truth)
            answer[kind][f"ratio_{name}"] = statistics.median(a / max(b, 1e-12) for a, b in zip(said, truth))
    return answer


def sparse_rows(
    tokens: int, seed: int, spread: float, spread_v: float, needles: int = 3, packed_mass: float = 0.7
) -> LayerRows:
    """Heads whose attention lies on a few needles among random keys, the rest of it in the window.

    ``spread`` scales what of the keys is orthogonal to the query, ``spread_v`` what values do not share, and so how
    far codes make attention and its output drift.
    """
    g = torch.Generator().manual_seed(seed)
    dim = 64
    q = torch.randn(SPARSE_HEADS, SPARSE_QUERIES, dim, generator=g)
    q = q.mean(1, keepdim=True) * 4 + 0.1 * q
    k, v = torch.randn(2, SPARSE_HEADS, tokens, dim, generator=g)
    v = torch.randn(SPARSE_HEADS, 1, dim, generator=g) + spread_v * v
    for h in range(SPARSE_HEADS):
        direction = q[h].mean(0) / q[h].mean(0).norm()
        along = (k[h] @ direction)[:, None] * direction
        k[h] = along + spread * (k[h] - along)
        size = float(q[h].mean(0).norm()) * dim**-0.5
        background = torch.logsumexp((q[h, 0] * dim**-0.5) @ k[h].T, 0)
        places = torch.randint(64, tokens - 600, (needles,), generator=g)
        for at, mass in ((places, packed_mass), (torch.arange(tokens - 40, tokens - 37), 1 - packed_mass)):
            level = background + torch.tensor(20.0 * mass / len(at)).log()
            k[h, at] += (level / size) * direction
    return LayerRows(q, k, v)


def sparse_layer(tokens: int, index: int) -> dict[str, dict[str, float]]:
    """Many sparse heads: the drift of one is that of three rows' noise, which nothing predicts."""
    steps = index / (SPARSE_LAYERS - 1), index * 3 % SPARSE_LAYERS / (SPARSE_LAYERS - 1)
    found = []
    for group in range(SPARSE_GROUPS):
        rows = sparse_rows(tokens, SPARSE_GROUPS * index + group, 2 ** (3 * steps[0]), 2 ** (3 * steps[1] - 2))
        found.append(one_layer(rows, calibrated(rows), 64**-0.5))
    return {
        kind: {name: statistics.fmean(x[kind][name] for x in found) for name in found[0][kind]} for kind in found[0]
    }


def calibrated(rows: LayerRows) -> LayerProfile:
    """Profile of a synthetic layer, from its first 2,048 rows and random queries."""
    g = torch.Generator().manual_seed(0)
    stats = MomentAccumulator(64, 8, g)
    x = torch.randn(1, len(rows.keys), 2048, 64, generator=g)
    stats.update(x, rows.keys[None, :, :2048], rows.values[None, :, :2048], x.transpose(1, 2))
    moments = stats.result()
    transform = make_transform("balanced", moments)
    kappa = measure_kappa(stats.reservoir()[0] @ transform.k_forward.float(), CodecConfig())
    return LayerProfile(transform.float(), kappa, *energies(transform, moments))


def memory(layers: int = 80, kv_heads: int = 8, head_dim: int = 128, item_bytes: int = 2) -> dict[str, int]:
    """Bytes a sequence of both canaries, for the shape of Llama 3.1 70B; the ring keeps keys, the other nothing."""
    return {"ring": RING_TOKENS * layers * kv_heads * head_dim * item_bytes, "anchored": 0}


@torch.no_grad()
def main() -> None:
    """Run on real text, and on synthetic sparse heads if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--text")
    parser.add_argument("--seq-len", type=int, default=1500)
    parser.add_argument("--synthetic", action="store_true", help="heads with three needles and 70 % packed mass")
    parser.add_argument("--memory", action="store_true", help="only say what the canaries keep of a 70B model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.memory:
        print(memory())
        return
    if args.json is None:
        parser.error("--json OUT is needed")
    if args.synthetic:
        layers = []
        for i in range(SPARSE_LAYERS):
            layers.append(sparse_layer(args.seq_len, i))
            print(i, {kind: {k: float(f"{x:.3g}") for k, x in v.items()} for kind, v in layers[-1].items()}, flush=True)
    else:
        model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        text = "\n\n".join(load_documents(args.text))[: 8 * args.seq_len]
        ids = tokenizer(text, return_tensors="pt").input_ids[:, : args.seq_len]
        profile = Profile.load(args.profile)
        scaling = layer_scaling(model, [x.head_dim if x else 0 for x in profile.layers])
        rows_of = record_rows(model, ids, QUERIES)
        layers = [one_layer(rows_of[i], p, scaling[i]) for i, p in profile.packed.items()]  # type: ignore[arg-type]
    answer = summary(layers)
    args.json.write_text(json.dumps(answer | {"seq_len": args.seq_len, "layers": layers}, indent=1))
    for kind, values in answer.items():
        print(kind, {name: round(x, 3) for name, x in values.items()})


if __name__ == "__main__":
    main()
