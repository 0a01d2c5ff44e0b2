import json
from functools import lru_cache

import pytest
import torch

from lamina.app.plan import chunk_bytes, longest, sequence_bytes, served_bytes, slot_bytes
from lamina.basis.encoder import PageEncoder
from lamina.basis.geometry import model_geometry
from lamina.basis.profile import Profile
from lamina.codec import CodecConfig
from lamina.engines.hf import LaminaCache, cache_kwarg
from lamina.engines.vllm.config import AUTO
from lamina.engines.vllm.sizes import LayerShape, exact_pages, sizes
from lamina.errors import ConfigError
from lamina.pages import Budget, EncodingWriter, LayerStore, WindowConfig
from lamina.pages.layout import RecordLayout
from tiny_llama import make_model

LENGTHS = (1, 63, 64, 65, 384, 448, 449, 1000, 2048, 5003)
WINDOWS = (WindowConfig(), WindowConfig(0, 0, 0), WindowConfig(128, 64, 0))
GROWTH = 1 / 32


def memory(store: LayerStore) -> int:
    return sum(store.memory().values())


class OnePageEncoder:
    """Encodes one page for real and repeats it: only sizes matter here."""

    def __init__(self, profile: Profile) -> None:
        self.encoder = PageEncoder(profile.layers[0], CodecConfig(), 0.25, "cpu")
        self.encode_one = lru_cache(self._encode_one)

    def _encode_one(self, bits_k, bits_v):
        page = torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
        return self.encoder.encode(page, page, bits_k, bits_v)

    def encode(self, k, v, bits_k, bits_v):
        return self.encode_one(bits_k, bits_v)

    def shed_loss(self, k, v):
        return torch.zeros(1, 2, 2)


def filled(encoder, tiers, tokens, chunk, dtype, window) -> LayerStore:
    """A real store of one layer, fed ``chunk`` rows at a time."""
    store = LayerStore(
        2,
        16,
        dtype,
        "cpu",
        window=window,
        writer=EncodingWriter(encoder),
        tiers=lambda: tiers,
        budget=Budget(),
        mirrored=True,
    )
    rows = torch.zeros(2, 1, 2, tokens, 16, dtype=dtype)
    for start in range(0, tokens, chunk):
        store.append(*rows[:, :, :, start : start + chunk])
    return store


def one_layer(tiny):
    return model_geometry(make_model(layers=1).config), OnePageEncoder(Profile.load(tiny.profile))


@pytest.mark.parametrize("tiers", [(2, 2), (4, 2), (2, 8), (8, 8)])
@pytest.mark.parametrize("window", WINDOWS)
def test_bytes_are_those_of_a_store_fed_page_by_page(tiny, tiers, window):
    """Equal up to the pools' growth: at most 1/32 more, and one page of exact rows less at a page's end."""
    geometry, encoder = one_layer(tiny)
    for tokens in LENGTHS:
        for dtype in (torch.float32, torch.bfloat16):
            predicted = sequence_bytes(geometry, [tiers], tokens, dtype, window)
            found = memory(filled(encoder, tiers, tokens, 64, dtype, window))
            exact = slot_bytes(2, 16, dtype)[2]
            assert predicted - exact <= found <= predicted * (1 + GROWTH), (tokens, dtype)
            if tokens < 32 * 64 and tokens % 64:
                assert found == predicted, (tokens, dtype)


@pytest.mark.parametrize("chunk", [1, 7, 64, 500, 5003])
def test_bytes_hold_for_every_way_of_feeding(tiny, chunk):
    """A chunk keeps exact rows of as many pages as it touches, up to one recent window, until it has been read."""
    geometry, encoder = one_layer(tiny)
    window = WindowConfig()
    exact = slot_bytes(2, 16, torch.float32)[2]
    spare = 0 if chunk in (1, 64) else min(-(-chunk // 64), (window.recent + window.rollback) // 64 + 1)
    for tokens in (1, 65, 449, 1000) if chunk < 64 else LENGTHS:
        predicted = sequence_bytes(geometry, [(4, 2)], tokens, torch.float32, window)
        store = filled(encoder, (4, 2), tokens, chunk, torch.float32, window)
        assert predicted - exact <= memory(store) <= predicted * (1 + GROWTH) + spare * exact, tokens
        store.settle()
        assert memory(store) <= predicted * (1 + GROWTH) + min(spare, 3) * exact, tokens


def test_bytes_are_those_of_a_cache_of_a_model(tiny):
    model = make_model()
    profile = Profile.load(tiny.profile)
    cache = LaminaCache(model, profile, tiers=[(2, 2), (8, 4)])
    ids = torch.randint(2, 258, (1, 1100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for start in range(0, 1100, 50):
            model(input_ids=ids[:, start : start + 50], use_cache=True, **cache_kwarg(model, cache))
    predicted = sequence_bytes(model_geometry(model.config), cache.tiers, 1100, torch.float32, cache.window)
    spare = 2 * slot_bytes(2, 16, torch.float32)[2]  # one page in each layer, as chunks of 50 cross pages
    tables = 2 * (18 * 11 + 32) * 4  # a GPU's own, which a cache on the CPU does not have
    assert predicted - tables <= sum(cache.memory().values()) <= predicted - tables + spare


def test_slots_follow_the_record_layout():
    page, slab, exact = slot_bytes(8, 128, torch.bfloat16)
    layout = RecordLayout(8, 128)
    assert page == layout.record_bytes + 2 * 11 * 4 + 4 * 4 + 2 * 4
    assert slab == layout.slab_bytes
    assert exact == 2 * 8 * 64 * 128 * 2


def test_one_tier_is_for_all_layers():
    geometry = model_geometry(make_model().config)
    window = WindowConfig()
    one = sequence_bytes(geometry, [(4, 2)], 3000, torch.bfloat16, window)
    assert one == sequence_bytes(geometry, [(4, 2)] * 2, 3000, torch.bfloat16, window)
    with pytest.raises(ConfigError, match="3 tiers do not fit 2 layers"):
        sequence_bytes(geometry, [(4, 2)] * 3, 3000, torch.bfloat16, window)


@pytest.mark.parametrize("tiers", [[(2, 2)], [(4, 2)], [(2, 2), (8, 4)]])
@pytest.mark.parametrize("tokens", [64, 1000, 32768])
def test_requests_of_vllm_are_as_many_as_its_pools_hold(tiers, tokens):
    geometry, window, n = model_geometry(make_model().config), WindowConfig(64, 256, 0), 7
    chunk = chunk_bytes(geometry, 512, torch.bfloat16)
    available = n * served_bytes(geometry, tiers, tokens, torch.bfloat16, window) + chunk
    shapes = [LayerShape(i, g.n_kv_heads, 0, g.head_dim) for i, g in geometry.packed.items()]
    by_layer = [tiers[i % len(tiers)] for i in geometry.packed]
    for spare, pages in ((0, n * -(-tokens // 64)), (-1, n * -(-tokens // 64) - 1)):
        shares = sizes(available + spare, shapes, 2, by_layer, AUTO, exact_pages(window, n, 512))
        if shares.exact_pages == exact_pages(window, n, 512):
            assert shares.blocks == pages
        else:
            assert tokens == 64 and shares.blocks >= pages, "fewer exact pages than requests could have are enough"


@pytest.mark.parametrize("budget", [0, 1, 99, 100, 101, 12345])
def test_longest(budget):
    assert longest(lambda tokens: 100 * tokens, budget) == budget // 100


@pytest.fixture
def plan(tiny, lamina):
    def run(*args):
        result = lamina("plan", tiny.model, *args, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


def test_what_fits(plan):
    found = plan("--memory", "8M", "--context", 1000)
    assert found["weight_bytes"] == sum(p.numel() * 2 for p in make_model().parameters()) + 32 * 2
    assert found["reserve_bytes"] == int(0.1 * 8 * 2**20)
    assert found["cache_bytes"] == 8 * 2**20 - found["reserve_bytes"] - found["weight_bytes"]
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["bf16", "fp8", "2", "k4v2", "4", "8"]
    assert rows["bf16"]["request_bytes"] == 1000 * 2 * rows["fp8"]["bytes_per_token"] == 1000 * 4 * 2 * 2 * 16
    geometry = model_geometry(make_model().config)
    for name, tiers in (("2", (2, 2)), ("k4v2", (4, 2)), ("4", (4, 4)), ("8", (8, 8))):

        def size(tokens, tiers=tiers):
            return sequence_bytes(geometry, [tiers], tokens, torch.bfloat16, WindowConfig())

        row = rows[name]
        assert row["request_bytes"] == size(1000)
        assert row["requests"] == found["cache_bytes"] // size(1000)
        assert size(row["max_tokens"]) <= found["cache_bytes"] < size(row["max_tokens"] + 1)


def test_settings_change_the_plan(plan, tiny):
    base = plan("--memory", "8M")
    assert base["context"] == 4096
    assert plan("--memory", "8M", "--dtype", "float32")["weight_bytes"] > base["weight_bytes"]
    assert plan("--memory", "8M", "--reserve", 50)["cache_bytes"] < base["cache_bytes"]
    assert plan("--memory", "8M", "--max-batch", 4)["rows"][2]["max_tokens"] < base["rows"][2]["max_tokens"] / 3
    assert [r["name"] for r in plan("--memory", "8M", "--tier", "8", "--tier", "k2v4")["rows"]][2:] == ["8", "k2v4"]
    rows = {r["name"]: r for r in plan("--memory", "8M", "--profile", tiny.profile)["rows"]}
    assert rows["profile's"]["request_bytes"] == rows["k4v2"]["request_bytes"]
    on_vllm = plan("--memory", "8M", "--engine", "vllm", "--batched-tokens", 64)
    assert on_vllm["rows"][2]["request_bytes"] < base["rows"][2]["request_bytes"], "nothing is kept to roll back"
    assert any("--max-num-seqs" in note for note in on_vllm["notes"])
    assert any("fewer than the context" in note for note in plan("--memory", "8M", "--context", 5000)["notes"])


def test_the_table(tiny, lamina):
    result = lamina("plan", tiny.model, "--memory", "8M", "--context", 2000)
    assert result.exit_code == 0
    for part in ("weights", "reserve", "bf16", "fp8", "Lamina k4v2", "requests of 2,000 tokens", "exact tokens"):
        assert part in result.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--memory", "lots"), "--memory lots 24G"),
        (("--memory", "0"), "--memory"),
        (("--memory", "10K"), "weights take nothing --memory"),
        (("--memory", "8M", "--tier", "6"), "tier 6"),
        (("--memory", "8M", "--dtype", "fp8"), "unknown dtype fp8"),
        (("--memory", "8M", "--reserve", "100"), "--reserve"),
        (("--memory", "8M", "--profile", "missing"), "no profile at missing"),
        (("--memory", "8M", "--recent", "100"), "recent=100"),
        (("--memory", "8M", "--engine", "sglang"), "unknown engine sglang transformers vllm"),
        (("--memory", "8M", "--engine", "vllm", "--batched-tokens", "100000"), "--batched-tokens"),
    ],
)
def test_wrong_settings(tiny, refused, args, words):
    refused("plan", tiny.model, *args, words=words)


def test_wrong_model(tiny, other, refused, tmp_path):
    refused("plan", tmp_path / "none", "--memory", "1G", words="no model folder")
    refused("plan", other.model, "--memory", "1G", "--profile", tiny.profile, words="does not fit this model")
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    refused("plan", tmp_path, "--memory", "1G", words="Lamina cannot serve t5")
