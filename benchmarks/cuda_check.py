"""Does the cache give the same answers on a GPU as the exact run and as the reference? (No kernels yet: correctness.)

python benchmarks/cuda_check.py
"""

import time

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from lamina.attention.blocked import attend_blocked
from lamina.attention.reference import attend_reference
from lamina.attention.types import ReadBasis
from lamina.basis.calibrate import calibrate
from lamina.basis.encoder import PageEncoder
from lamina.codec import CodecConfig
from lamina.engines.hf import LaminaCache, cache_kwarg
from lamina.pages import Budget, EncodingWriter, LayerStore, WindowConfig


def against_reference(profile, device: str) -> None:
    """Attention over pages on the device against the float64 reference on the CPU, same stored bytes."""
    heads, dim = profile.layers[0].n_kv_heads, profile.layers[0].head_dim
    for bits in ((2, 2), (4, 2), (8, 8), (2, 4)):
        encoder = PageEncoder(profile.layers[0], CodecConfig(), dim**-0.5, device)
        store = LayerStore(
            heads, dim, torch.bfloat16, device, window=WindowConfig(), writer=EncodingWriter(encoder),
            tiers=lambda bits=bits: bits, budget=Budget(),
        )  # fmt: skip
        basis = ReadBasis(encoder.q_forward, encoder.v_back, encoder.mean_v, encoder.kappa, encoder.scaling)
        q = torch.randn(1, 2 * heads, 800, dim, device=device)
        k, v = (torch.randn(1, heads, 800, dim, device=device).bfloat16() for _ in range(2))
        worst = 0.0
        for a, b in ((0, 700), (700, 764), (764, 799), (799, 800)):
            store.append(k[:, :, a:b], v[:, :, a:b])
            if a == 0:
                continue
            chunk = (k[:, :, a:b], v[:, :, a:b])
            got = attend_blocked(q[:, :, a:b], store.view(), basis, chunk).out.cpu()
            view, cpu = (
                store.view(),
                ReadBasis(
                    *(getattr(basis, n).cpu() for n in ("q_forward", "v_back", "mean_v", "kappa")), basis.scaling
                ),
            )
            view.records, view.slabs, view.exact = (x.cpu() for x in (view.records, view.slabs, view.exact))
            want = attend_reference(q[:, :, a:b].cpu(), view, cpu, tuple(x.cpu() for x in chunk)).out
            worst = max(worst, float((got - want).abs().max() / want.abs().max()))
        print(f"tiers {bits}: worst relative error {worst:.2e}")


def main() -> None:
    """Run all checks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4, vocab_size=2000,
        intermediate_size=2048, max_position_embeddings=16384,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
    profile = calibrate(model, [torch.randint(2000, (1, 2048)) for _ in range(6)])
    print(device, profile.info)
    against_reference(profile, device)
    ids = torch.randint(2000, (1, 4096), device=device)
    with torch.no_grad():
        truth = model(ids, use_cache=False).logits[:, -1].float().log_softmax(-1)
        for tiers in (2, (4, 2), 4, 8):
            cache = LaminaCache(model, profile, tiers=tiers)
            start = time.time()
            for i in range(0, 4096, 512):
                logits = model(ids[:, i : i + 512], **cache_kwarg(model, cache)).logits
            log_q = logits[:, -1].float().log_softmax(-1)
            kl = float((truth.exp() * (truth - log_q)).sum())
            same = sum(cache.memory().values()) == sum(
                p.n_bytes for x in cache.layers for p in x.store.arena.pools
            ) + sum(x.store.page_ids().untyped_storage().nbytes() for x in cache.layers)
            print(f"tiers {tiers}: KL {kl:.5f}, {time.time() - start:.2f} s, bits {cache.bits()}, bytes add up {same}")
        cache = LaminaCache(model, profile, tiers=8)
        out = model.generate(ids[:, :1000], max_new_tokens=40, do_sample=False, **cache_kwarg(model, cache))
        exact = DynamicCache(config=model.config)
        plain = model.generate(ids[:, :1000], max_new_tokens=40, do_sample=False, **cache_kwarg(model, exact))
        print("greedy INT8 tokens equal to the exact run's:", int((out == plain)[:, 1000:].sum()), "of 40")


if __name__ == "__main__":
    main()
