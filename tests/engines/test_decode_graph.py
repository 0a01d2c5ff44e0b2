"""Decode steps as a CUDA graph runs them: on the CPU the same kernels and books without the graph, on a GPU with it."""

from functools import partial

import pytest
import torch

import tiny_models
from host import needs_compiler, needs_gpu, on_host
from lamina.attention.cuda import decode, encode, tables
from lamina.attention.cuda.encode import CudaPageWriter
from lamina.control.config import ControllerConfig
from lamina.engines import hf_layer
from lamina.engines.hf import LaminaCache, cache_kwarg
from lamina.engines.hf_graph import DecodeGraph
from lamina.errors import CacheStateError, ConfigError, MemoryBudgetError, NonFiniteError
from lamina.pages import LayerStore, WindowConfig
from tiny_models import PAD, logits_of, profile_of

pytestmark = needs_compiler
WINDOW = WindowConfig(64, 64, 64)


class CountingGraph(DecodeGraph):
    captures = 0

    def _capture(self, measured):
        self.captures += 1
        return super()._capture(measured)


class HostGraph(CountingGraph):
    """A step runs at once, and is captured as often as the real one."""

    _anywhere = True

    def _replay(self, measured):
        if measured not in self._graphs:
            self._graphs[measured] = True
            self.captures += 1
        for layer in self.cache.ours:
            view, arena = self._views[layer.index], layer.store.arena
            there = [*(pool.data[0] for pool in arena.pools), arena.pages.data[4]]
            for mine, now in zip((view.records, view.slabs, view.exact, view.table), there):
                assert mine.data_ptr() == now.data_ptr(), "a captured graph would write to storage that is gone"
        return self._run(measured)


GRAPHS = {"cpu": HostGraph, "cuda": CountingGraph}
PLACE = ["cpu"]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)], autouse=True)
def device(request, monkeypatch):
    PLACE[0] = request.param
    if request.param == "cpu":
        for module in (decode, encode, tables):
            on_host(monkeypatch, module)
        monkeypatch.setattr(encode, "most_shared", lambda device: 227 * 1024)
        monkeypatch.setattr(hf_layer, "LayerStore", partial(LayerStore, mirrored=True))
        monkeypatch.setattr(hf_layer, "page_writer", CudaPageWriter)


def build(kind):
    return tiny_models.build(kind).to(PLACE[0])


def tokens(*args):
    return tiny_models.tokens(*args).to(PLACE[0])


def graph_of(*args, **kwargs):
    return GRAPHS[PLACE[0]](*args, **kwargs)


def read(model, cache, ids, **kwargs):
    return logits_of(model, ids, **cache_kwarg(model, cache), **kwargs)[:, -1]


def steps(model, cache, ids, n, **kwargs):
    """Logits of n greedy steps."""
    found = []
    for _ in range(n):
        logits = read(model, cache, ids, **kwargs)
        found.append(logits)
        ids = logits.argmax(-1, keepdim=True)
    return torch.stack(found, 1)


def both(model, run, **settings):
    """What a run gives with and without a graph, and the two caches."""
    caches = [
        LaminaCache(model, profile_of(type(model).__name__.removesuffix("ForCausalLM")), **settings) for _ in (0, 1)
    ]
    plain = run(caches[0])
    with graph_of(model, caches[1], reserve=64) as graph:
        graphed = run(caches[1])
    assert graph.captures
    for a, b in zip(caches[0].stores, caches[1].stores):
        assert [s.length for s in a.sequences] == [s.length for s in b.sequences]
        assert sum(b.memory().values()) > 0
    used = sum(caches[1].memory().values())
    assert caches[1].budget.used == used
    return plain, graphed, caches


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_steps_give_what_they_give_without_a_graph(kind):
    """Over the ends of pages, until rows are read packed; pages close with the same tiers."""
    model = build(kind)
    prompt = tokens(2, 187)

    def run(cache):
        first = read(model, cache, prompt)
        return steps(model, cache, first.argmax(-1, keepdim=True), 80)

    plain, graphed, caches = both(model, run, tiers=(4, 2), window=WINDOW)
    torch.testing.assert_close(graphed, plain, rtol=0, atol=5e-3)
    tables = [[s.arena.table[p, :4].tolist() for q in s.sequences for p in q.pages] for s in caches[0].stores]
    assert tables == [[s.arena.table[p, :4].tolist() for q in s.sequences for p in q.pages] for s in caches[1].stores]


def test_generate_takes_its_steps_from_the_graph():
    model, ids = build("Llama"), tokens(2, 100)
    settings = {"max_new_tokens": 40, "do_sample": False}

    def run(cache):
        return model.generate(ids, **cache_kwarg(model, cache), **settings)

    plain, graphed, _ = both(model, run, tiers=8, window=WINDOW)
    assert torch.equal(plain, graphed)


def test_pages_of_all_layers_close_in_one_launch(monkeypatch):
    model = build("Llama")
    cache = LaminaCache(model, profile_of("Llama"), tiers=(4, 8), window=WINDOW)
    jobs, launch = [], CudaPageWriter.launch
    with graph_of(model, cache):
        read(model, cache, tokens(2, 126))
        monkeypatch.setattr(CudaPageWriter, "launch", lambda self, x: jobs.append(len(x)) or launch(self, x))
        steps(model, cache, tokens(2, 1), 3)
    assert jobs == [4]  # two layers of two sequences
    for store in cache.stores:
        closed = [p for s in store.sequences for p in s.pages if store.arena.cell(p, 2)]
        assert len(closed) == 4 and bool((store.arena.loss[closed, 0, 0] > 0).all())


def test_padded_rows_end_pages_at_different_steps():
    model, ids = build("Llama"), tokens(3, 130)
    mask = torch.ones_like(ids)
    for b, n in enumerate((0, 37, 101)):
        ids[b, :n], mask[b, :n] = PAD, 0

    def run(cache):
        return model.generate(ids, attention_mask=mask, max_new_tokens=45, do_sample=False, **cache_kwarg(model, cache))

    plain, graphed, _ = both(model, run, tiers=(4, 4), window=WINDOW)
    assert torch.equal(plain, graphed)


def test_a_cache_may_be_cropped_extended_and_restored_between_steps():
    model, prompt = build("Llama"), tokens(2, 150)

    def run(cache):
        found = [read(model, cache, prompt)]
        found.append(steps(model, cache, tokens(2, 1, 5), 50)[:, -1])
        cache.crop(170)
        found.append(steps(model, cache, tokens(2, 1, 6), 30)[:, -1])
        taken = cache.snapshot()
        found.append(steps(model, cache, tokens(2, 1, 7), 40)[:, -1])
        cache.restore(taken)
        found.append(steps(model, cache, tokens(2, 1, 7), 40)[:, -1])
        found.append(read(model, cache, tokens(2, 33, 8)))
        cache.select([1, 0, 1])
        found.append(steps(model, cache, tokens(3, 1, 9), 40)[:2, -1])
        return torch.cat(found)

    plain, graphed, _ = both(model, run, tiers=(8, 8), window=WINDOW)
    torch.testing.assert_close(graphed, plain, rtol=0, atol=5e-3)
    torch.testing.assert_close(graphed[6:8], graphed[8:10], rtol=0, atol=1e-4)


def test_the_controller_decides_as_it_does_without_a_graph():
    model, prompt = build("Llama"), tokens(1, 260)
    config = ControllerConfig(rate=1 / 4, target_bits=4.0)
    firings = []

    def run(cache):
        told = []
        cache.listeners.append(lambda event: told.append(event) if event["event"] == "firing" else None)
        read(model, cache, prompt)
        out = steps(model, cache, tokens(1, 1, 3), 30)
        firings.append(told)
        return out

    plain, graphed, caches = both(model, run, tiers=(4, 4), window=WINDOW, controller=config)
    torch.testing.assert_close(graphed, plain, rtol=0, atol=5e-3)
    assert len(firings[0]) == len(firings[1]) > 3
    assert caches[0].tiers == caches[1].tiers


def test_a_byte_limit_holds():
    model, prompt = build("Llama"), tokens(1, 200)
    free = LaminaCache(model, profile_of("Llama"), tiers=8, window=WINDOW)
    read(model, free, prompt)
    steps(model, free, tokens(1, 1), 200)
    limit = int(0.8 * sum(free.memory().values()))

    def run(cache):
        read(model, cache, prompt)
        out = steps(model, cache, tokens(1, 1), 200)
        assert cache.budget.used <= limit
        return out

    _, _, caches = both(model, run, tiers=8, window=WINDOW, max_bytes=limit)
    assert caches[1].pager.planes_shed > 0


def test_storage_that_a_refused_call_cuts_is_found_again():
    """Making room for what does not fit gives free slots back; rows written to what was there before would be lost."""
    model, prompt = build("Llama"), tokens(1, 670)

    def run(cache):
        read(model, cache, prompt)
        taken = cache.snapshot()
        read(model, cache, tokens(1, 40, 1))
        cache.crop(675)
        found = [steps(model, cache, tokens(1, 1), 3)]
        with pytest.raises(MemoryBudgetError):
            read(model, cache, tokens(1, 13000, 4))
        found.append(steps(model, cache, tokens(1, 1, 2), 25))
        found.append(read(model, cache, tokens(1, 2, 3))[:, None])
        taken.release()
        return torch.cat(found, 1)

    plain, graphed, _ = both(model, run, tiers=2, window=WindowConfig(0, 256, 64), max_bytes=720_000)
    torch.testing.assert_close(graphed, plain, rtol=0, atol=2e-2)


def test_pages_off_the_grid_close_as_they_do_without_a_graph():
    """Behind a long crop pages start anywhere; without recent exact tokens, one is read packed as it fills up."""
    model, prompt = build("Qwen2"), tokens(2, 300)

    def run(cache):
        read(model, cache, prompt)
        cache.crop(241)
        return steps(model, cache, tokens(2, 1), 70)

    plain, graphed, _ = both(model, run, tiers=4, window=WindowConfig(0, 0, 0))
    torch.testing.assert_close(graphed, plain, rtol=0, atol=2e-2)


def test_sequences_that_share_an_open_page_part():
    model, prompt = build("Llama"), tokens(1, 100)

    def run(cache):
        read(model, cache, prompt)
        cache.select([0, 0, 0])
        return steps(model, cache, tokens(3, 1), 40)

    plain, graphed, _ = both(model, run, tiers=8, window=WINDOW)
    torch.testing.assert_close(graphed, plain, rtol=0, atol=5e-3)


def test_a_step_that_fails_may_be_repeated():
    model, prompt = build("Llama"), tokens(1, 100)
    profile = profile_of("Llama")
    caches = [LaminaCache(model, profile, tiers=8, window=WINDOW) for _ in (0, 1)]
    found = []
    for cache in caches:
        with graph_of(model, cache):
            read(model, cache, prompt)
            if cache is caches[1]:
                hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
                for _ in range(2):
                    with pytest.raises(ZeroDivisionError):
                        read(model, cache, tokens(1, 1))
                hook.remove()
            found.append(steps(model, cache, tokens(1, 1), 30))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-4)


def test_a_graph_may_be_opened_again_and_leaves_the_model_as_it_was():
    model, prompt = build("Llama"), tokens(1, 100)
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    mine = model.forward
    plain = LaminaCache(model, profile_of("Llama"), tiers=8, window=WINDOW)
    cache = LaminaCache(model, profile_of("Llama"), tiers=8, window=WINDOW, controller=ControllerConfig(rate=1.0))
    model.forward = own
    del model.forward
    expected = [read(model, plain, prompt), steps(model, plain, tokens(1, 1), 4), steps(model, plain, tokens(1, 1), 4)]
    model.forward = mine
    graph = graph_of(model, cache)
    model.forward = mine
    got = []
    with graph:
        got += [read(model, cache, prompt), steps(model, cache, tokens(1, 1), 4)]
    assert model.forward is mine
    with graph:
        got.append(steps(model, cache, tokens(1, 1), 4))
        cache.reset()
    del model.forward
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-3)


def test_damaged_rows_are_reported():
    model = build("Llama")
    cache = LaminaCache(model, profile_of("Llama"), window=WINDOW)
    with pytest.raises(NonFiniteError, match="layer 1"), graph_of(model, cache):
        read(model, cache, tokens(1, 70))
        model.model.layers[1].self_attn.v_proj.weight.data[3, 3] = float("nan")
        steps(model, cache, tokens(1, 1), 2)


@pytest.mark.parametrize(("hidden", "padded"), [(-1, False), (5, False), (-1, True), (40, True), (0, True)])
def test_a_mask_that_is_not_what_the_cache_holds_is_an_error(hidden, padded):
    model = build("Llama")
    cache = LaminaCache(model, profile_of("Llama"), window=WINDOW)
    mask = torch.ones(2, 71, dtype=torch.long, device=PLACE[0])
    mask[1, :3] = int(not padded)
    with pytest.raises(CacheStateError, match="not padding"), graph_of(model, cache):
        read(model, cache, tokens(2, 70), attention_mask=mask[:, :-1])
        mask[1, hidden] ^= 1
        read(model, cache, tokens(2, 1), attention_mask=mask)


def test_calls_that_are_no_steps_run_without_the_graph(caplog):
    model, ids = build("Llama"), tokens(2, 90)
    cache, other = (LaminaCache(model, profile_of("Llama"), window=WINDOW) for _ in (0, 1))
    with graph_of(model, cache) as graph:
        read(model, cache, ids)
        expected = logits_of(model, ids)
        torch.testing.assert_close(read(model, other, ids), expected[:, -1], rtol=0, atol=1e-4)
        out = model(input_ids=ids[:, :1], output_hidden_states=True, **cache_kwarg(model, cache))
        assert len(out.hidden_states) == 3 and not graph.captures
        read(model, cache, ids[:, :1])
        assert graph.captures == 1 and cache.seen == 92
    assert "forward" not in vars(model)
    assert "output_hidden_states" in caplog.text


def test_what_cannot_be_captured_is_refused():
    model = build("Llama")
    cache = LaminaCache(model, profile_of("Llama"), window=WINDOW)
    if PLACE[0] == "cpu":
        with pytest.raises(ConfigError, match="NVIDIA GPU"):
            DecodeGraph(model, cache)
    with pytest.raises(ConfigError, match="reserve"):
        graph_of(model, cache, reserve=3)
    ring = LaminaCache(model, profile_of("Llama"), controller=ControllerConfig(canary="ring"))
    with pytest.raises(ConfigError, match="ring"):
        graph_of(model, ring)
    with graph_of(model, cache), pytest.raises(CacheStateError, match="another DecodeGraph"), graph_of(model, cache):
        pass
