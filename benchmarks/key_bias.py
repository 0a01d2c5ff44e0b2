"""Does a large key bias, as Qwen2 has it, spoil 2-bit keys?

Builds a random-weight Qwen2 whose first and last layers have a key bias of norm 280 to 900, 95 % of its energy in the
slowest-rotating quarter of the rotary pairs and the rest in the next quarter. Queries are small where the bias is
large, as in a trained model, whose attention would otherwise look at nothing but the bias. The model is calibrated with
and without the bias, and the mean KL of those layers' attention distributions is compared near position 0 and near the
model's maximum.

    python benchmarks/key_bias.py --csv benchmarks/results/key_bias.csv
"""

import argparse
from pathlib import Path

import torch
from report import write_csv
from transformers import Qwen2Config, Qwen2ForCausalLM

from lamina.attention.types import ReadBasis
from lamina.basis.calibrate import CalibrationConfig, calibrate, capturing, forward_hidden
from lamina.basis.encoder import PageEncoder
from lamina.eval.arms import LAMINA, OSCAR, PUBLISHED
from lamina.eval.drift import attention_drift
from lamina.pages import Budget, EncodingWriter, LayerStore, WindowConfig

BIASED = {0: 280.0, 7: 900.0}
MAX_POSITIONS = 32768
TOKENS = 2048
QUERIES = 128
QUERY_BIAS_PRODUCT = 2.0
"""Bound on |q_i b_i| of a channel, before the logit scale."""


class Recorder:
    """Keeps the queries and keys of one forward pass."""

    def update(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor) -> None:
        """Called by the capturing attention."""
        self.q, self.k, self.v = q[0], k[0], v[0]


def make_model(with_bias: bool) -> Qwen2ForCausalLM:
    """Random weights, logits of unit spread, and the biases."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1000, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(1)
    for i, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        spectrum = torch.logspace(0, -1.5, 512)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            weight = torch.randn(projection.weight.shape, generator=generator) * spectrum
            projection.weight.data = weight / spectrum.norm()
            projection.bias.data.zero_()
        attention.q_proj.weight.data *= 3
        if i in BIASED:
            bias = key_bias(BIASED[i], attention.head_dim, 2, generator)
            shrink = (QUERY_BIAS_PRODUCT / bias.abs().clamp(min=QUERY_BIAS_PRODUCT)).view(2, 1, -1).expand(2, 4, -1)
            attention.q_proj.weight.data *= shrink.reshape(-1, 1)
            if with_bias:
                attention.k_proj.bias.data = bias
    return model


def key_bias(norm: float, dim: int, n_heads: int, generator: torch.Generator) -> torch.Tensor:
    """Bias of the given norm a head, 95 % of its energy in the slowest quarter of the pairs (i, i + D/2)."""
    pair = torch.arange(dim) % (dim // 2)
    heads = []
    for _ in range(n_heads):
        direction = torch.randn(dim, generator=generator) * (pair >= dim // 4)
        slowest = pair >= 3 * dim // 8
        direction[slowest] *= (0.95**0.5) / direction[slowest].norm()
        direction[~slowest] *= (0.05**0.5) / direction[~slowest].norm()
        heads.append(norm * direction)
    return torch.cat(heads)


def drift(model: Qwen2ForCausalLM, profile, codec, ids: torch.Tensor, offset: int) -> float:
    """Mean KL over the biased layers of the attention distributions of the last queries."""
    recorders = [Recorder() for _ in range(model.config.num_hidden_layers)]
    with torch.no_grad(), capturing(model, recorders) as collect, collect():
        forward_hidden(model, ids, offset)
    total = 0.0
    for i in BIASED:
        r = recorders[i]
        encoder = PageEncoder(profile.layers[i], codec, r.k.shape[-1] ** -0.5, "cpu")
        store = LayerStore(
            r.k.shape[0], r.k.shape[-1], r.k.dtype, "cpu", window=WindowConfig(), writer=EncodingWriter(encoder),
            tiers=lambda: (2, 2), budget=Budget(), centered=codec.center,
        )  # fmt: skip
        store.append(r.k[None], r.v[None])
        basis = ReadBasis(encoder.q_forward, encoder.v_back, encoder.mean_v, encoder.kappa, encoder.scaling)
        total += float(attention_drift(r.q[:, -QUERIES:], r.k, store.view(), basis).mean()) / len(BIASED)
    return total


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(2)
    text = [torch.randint(1000, (1, TOKENS), generator=generator) for _ in range(16)]
    rows = []
    for with_bias in (False, True):
        model = make_model(with_bias)
        profile = calibrate(model, text[:15], CalibrationConfig())
        for name, arm_profile, codec in (
            ("balanced", profile, LAMINA),
            ("oscar", profile.with_transform("oscar", per_head=False), OSCAR),
            ("oscar-head", profile.with_transform("oscar"), OSCAR),
            ("hadamard", profile.with_transform("hadamard"), PUBLISHED),
        ):
            for offset in (0, MAX_POSITIONS - TOKENS):
                kl = drift(model, arm_profile, codec, text[15], offset)
                rows.append({"transform": name, "bias": with_bias, "offset": offset, "kl": kl})
                print(f"{name:12s} bias={with_bias!s:5s} offset={offset:6d} KL {kl:.6f}", flush=True)
    for row in rows:
        same = [
            r for r in rows if r["transform"] == row["transform"] and r["offset"] == row["offset"] and not r["bias"]
        ]
        row["ratio_to_no_bias"] = row["kl"] / same[0]["kl"]
        if row["bias"]:
            print(f"{row['transform']:12s} offset={row['offset']:6d} with/without bias {row['ratio_to_no_bias']:.2f}")
    if args.csv:
        write_csv(rows, args.csv)


if __name__ == "__main__":
    main()
