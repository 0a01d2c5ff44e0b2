"""What a store writes: rows in the packed basis, around the page's center, at the tier asked for."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import oracle
from helpers import fill, generator, layer_profile, make_store, random_rows, stored
from lamina.basis.encoder import PageEncoder
from lamina.codec import CodecConfig
from lamina.pages import WindowConfig

STEP = 0.51


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (2, 80), (3, 112)])
def test_pages_hold_transformed_rows(heads: int, dim: int, dtype: torch.dtype) -> None:
    """At 8 bits each decoded element is within half a step of k A and of (v - mean) R, computed in float64."""
    profile = layer_profile(heads, dim, seed=3)
    store, _ = make_store(heads, dim, tiers=(8, 8), profile=profile, dtype=dtype)
    k, v = random_rows(2, heads, 192, dim, dtype=dtype)
    fill(store, k, v)
    t, bytes_ = profile.transform, stored(store.view())
    for b in (0, 1):
        for i, page in enumerate(bytes_.page_ids[b]):
            at = slice(64 * i, 64 * i + 64)
            rows = (k[b, :, at].double() @ t.k_forward.double()).numpy()
            values = ((v[b, :, at].double() - t.mean_v.double()[:, None]) @ t.v_forward.double()).numpy()
            for side, expected in enumerate((rows, values)):
                ours, step = bytes_.read(page, side)
                slack = abs(expected).max() * 2.0**-9  # midpoint and center scale have 16 bits
                assert (abs(ours - expected) <= STEP * step[..., None] + slack).all()
                assert np.linalg.norm(ours - expected) < 0.02 * np.linalg.norm(expected)


@pytest.mark.parametrize("rule", ["unbiased", "clip", "minmax"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_equal_the_oracle_end_to_end(bits: int, rule: str) -> None:
    """Transform, center (K alone), rule, packing. The product in float32 moves a code in a few thousand, by one."""
    profile, codec = layer_profile(2, 64, seed=1), CodecConfig(rule=rule, clip_k=0.97, clip_v=0.85)  # type: ignore[arg-type]
    store, _ = make_store(2, 64, tiers=(bits, bits), profile=profile, codec=codec)
    k, v = random_rows(1, 2, 64, 64)
    fill(store, k, v)
    s, t = stored(store.view()), profile.transform
    x = (k[0].double() @ t.k_forward.double()).numpy()
    ratio, scale = oracle.page_center(x)
    assert (s.field(0, "center", np.int8, 2, 64) == np.round(ratio)).all()
    assert (oracle.read_scale16(s.field(0, "center_scale", np.uint16, 2)) == scale).all()
    y = ((v[0].double() - t.mean_v.double()[:, None]) @ t.v_forward.double()).numpy()
    for side, (rows, clip) in enumerate(((x - (np.round(ratio) * scale[:, None])[:, None], 0.97), (y, 0.85))):
        expected = oracle.quantise(rows, bits, rule, clip)
        slabs = [s.field(0, "base", np.uint8, 2, 2, 64, 16)[side], *(s.slabs[i] for i in s.slots(0, side))]
        difference = abs(oracle.unpack(slabs) - expected.codes)
        assert difference.max() <= 1 and difference.mean() < 1e-3


def test_tiers_are_asked_for_when_pages_close() -> None:
    asked = []

    def tiers() -> tuple[int, int]:
        asked.append(len(asked))
        return [(2, 4), (8, 2), (4, 8)][len(asked) % 3]

    store, _ = make_store(1, 16, tiers=tiers)
    k, v = random_rows(1, 1, 4 * 64, 16)
    fill(store, k, v, chunk=64)
    assert store.arena.table[:, 2:4].tolist() == [[8, 2], [4, 8], [2, 4], [8, 2]]
    assert (store.arena.table[:, 4:10] >= 0).sum(1).tolist() == [3, 1 + 3, 1, 3]


def test_without_centers_nothing_is_stored_for_them() -> None:
    with_center, _ = make_store(2, 64)
    without, _ = make_store(2, 64, codec=CodecConfig(center=False))
    assert with_center.layout.record_bytes - without.layout.record_bytes in range(2 * 64 + 4 - 15, 2 * 64 + 4 + 16)
    k, v = random_rows(1, 2, 64, 64)
    fill(without, k, v)
    expected = oracle.quantise(
        (k[0].double() @ layer_profile(2, 64).transform.k_forward.double()).numpy(), 2, "unbiased"
    )
    codes = oracle.unpack([stored(without.view()).field(0, "base", np.uint8, 2, 2, 64, 16)[0]])
    assert (codes != expected.codes).mean() < 1e-3


def test_history_bits_count_what_is_read_packed() -> None:
    store, _ = make_store(2, 64, tiers=(4, 8), window=WindowConfig(64, 128, 64))
    k, v = random_rows(2, 2, 64 * 7 + 5, 64)
    fill(store, k, v, chunk=64)
    # positions 0..63 are sink; the next token at 453 reads pages from 448 - 128 exactly: four pages are packed
    per_page = store.layout.record_bytes + 4 * store.layout.slab_bytes
    assert store.history_bits() == (2 * 4 * per_page * 8, 2 * 4 * 2 * 2 * 64 * 64)


def test_an_encoder_rounds_bases_once_for_all_caches_and_reads_with_what_undoes_them() -> None:
    profile, g = layer_profile(2, 64, seed=5), generator(6)
    t = profile.transform
    noise = [1 + torch.rand(2, 64, 64, generator=g) / 1000 for _ in range(2)]
    off = replace(profile, transform=replace(t, k_forward=t.k_forward * noise[0], v_forward=t.v_forward * noise[1]))
    a, b = (PageEncoder(off, CodecConfig(), 1.0, "cpu") for _ in range(2))
    for x, exact in ((a.k_forward, off.transform.k_forward), (a.v_forward, off.transform.v_forward)):
        assert torch.equal(x, x.bfloat16().float()) and not torch.equal(x, exact)
    eye = torch.eye(64).expand(2, -1, -1)
    torch.testing.assert_close(a.k_forward @ a.q_forward.mT, eye, rtol=0, atol=1e-5)
    torch.testing.assert_close(a.v_forward @ a.v_back.mT, eye, rtol=0, atol=1e-5)
    assert all(getattr(a, n).data_ptr() == getattr(b, n).data_ptr() for n in ("k_forward", "q_forward", "v_back"))
