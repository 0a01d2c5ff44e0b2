"""Pages in an engine's blocks, driven by what a scheduler says; no vLLM is needed for it."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import generator, layer_profile, make_store
from lamina.attention.dispatch import attend
from lamina.basis.profile import Profile
from lamina.engines.vllm.config import AUTO, EngineConfig, engine_config
from lamina.engines.vllm.metrics_file import read_stats
from lamina.engines.vllm.state import LayerShape, WorkerState, exact_pages, sizes
from lamina.engines.vllm.worker import call
from lamina.errors import ConfigError
from lamina.pages import WindowConfig
from lamina.pages.table import EXACT, FINE, FINEST, TIER

HEADS, DIM, LAYERS = 2, 32, 2
BLOCKS, MOST, BUDGET = 40, 4, 256
WINDOW = WindowConfig(64, 128, 64)


@pytest.fixture
def config(tmp_path):
    def make(**fields):
        path = tmp_path / "model.profile"
        path.touch()
        return EngineConfig(str(path), sink=64, recent=128, **fields)

    return make


def worker(config, tiers=(8, 4), slabs=None):
    """A worker's state, whose blocks start as noise."""
    layers = [layer_profile(HEADS, DIM, seed=i) for i in range(LAYERS)]
    profile = Profile(layers, "model", "hash", "balanced", [tiers] * LAYERS)
    shapes = [LayerShape(i, HEADS, 0, DIM) for i in range(LAYERS)]
    most = exact_pages(WINDOW, MOST, BUDGET)
    shares = sizes(10**9, shapes, 4, [tiers] * LAYERS, AUTO, most)
    shares.__dict__.update(blocks=BLOCKS, slabs=BLOCKS * 8 if slabs is None else slabs)
    records = [
        torch.randint(0, 256, (BLOCKS, shape.layout.record_bytes), dtype=torch.uint8, generator=generator(7))
        for shape in shapes
    ]
    return WorkerState(config, profile, shapes, [DIM**-0.5] * LAYERS, records, torch.float32, shares, [tiers] * LAYERS)


class Scheduler:
    """Hands out blocks and feeds rows, as an engine does; a reference store a request and layer is fed the same."""

    def __init__(self, state, tiers=(8, 4), seed=0, compare=True):
        self.state, self.tiers, self.compare = state, tiers, compare
        self.free = list(range(1, BLOCKS))
        self.g = generator(seed)
        self.requests, self.finished = {}, set()

    def add(self, name, rows=None, blocks=(), tokens=0):
        """Start a request whose first ``tokens`` tokens are in ``blocks`` already."""
        n = 1024
        rows = torch.randn(LAYERS, 2, HEADS, n, DIM, generator=self.g) if rows is None else rows
        stores = [
            make_store(HEADS, DIM, tiers=self.tiers, window=WINDOW, profile=layer_profile(HEADS, DIM, seed=i))
            for i in range(LAYERS)
        ]
        self.requests[name] = SimpleNamespace(
            rows=rows, blocks=list(blocks), shared=len(blocks), tokens=tokens, new=True, stores=stores
        )

    def finish(self, name, tell=True):
        request = self.requests.pop(name)
        self.free += request.blocks[request.shared :]
        if tell:
            self.finished.add(name)
        return request

    def step(self, counts, back=()):
        """Feed so many tokens of each request; ``back``: requests whose last token is taken back before."""
        new, running, blocks_of = [], [], {}
        for name in back:
            self.requests[name].tokens -= 1
            for store, _ in self.requests[name].stores:
                store.crop([self.requests[name].tokens])
        for name, n in counts.items():
            r = self.requests[name]
            wanted = -(-(r.tokens + n) // 64)
            added = [self.free.pop(0) for _ in range(wanted - len(r.blocks))]
            r.blocks += added
            if r.new:
                new.append(SimpleNamespace(req_id=name, block_ids=(list(r.blocks),), num_computed_tokens=r.tokens))
            else:
                running.append((name, r.tokens))
                blocks_of[name] = (added,) if added else None
            r.new = False
        output = SimpleNamespace(
            scheduled_new_reqs=new, finished_req_ids=self.finished, preempted_req_ids=None,
            num_scheduled_tokens=counts,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[n for n, _ in running], resumed_req_ids=set(), num_computed_tokens=[t for _, t in running],
                new_block_ids=[blocks_of[n] for n, _ in running],
            ),
        )  # fmt: skip
        self.state.begin_step(output)
        self.finished = set()
        writers = self.state.writers()
        at = {name: writers[r.blocks[r.tokens // 64]] for name, r in self.requests.items() if name in counts}
        assert len(set(at.values())) == len(at)
        if not counts:
            return
        for i, layer in enumerate(self.state.layers.values()):
            rows = [(torch.empty(HEADS, 0, DIM),) * 2] * len(layer.store.sequences)
            for name, n in counts.items():
                r = self.requests[name]
                k, v = r.rows[i, :, :, r.tokens : r.tokens + n]
                rows[at[name]] = k, v
            among = tuple(torch.cat([pair[side] for pair in rows], 1) for side in (0, 1))
            layer.store.append_rows(rows, among)
            for name, n in counts.items():
                self._compare(i, layer, name, n, at[name], rows[at[name]])
        for name, n in counts.items():
            self.requests[name].tokens += n

    def _compare(self, i, layer, name, n, sequence, pair):
        store, basis = self.requests[name].stores[i]
        if not self.compare or store is None:
            return
        k, v = (x[None] for x in pair)
        store.append(k, v)
        q = torch.randn(1, 2 * HEADS, n, DIM, generator=self.g)
        want = attend(q, store.view(), basis, (k, v))
        got = attend(q, layer.store.view().of([sequence]), layer.basis, (k, v))
        torch.testing.assert_close(got.out, want.out, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got.lse, want.lse, rtol=1e-5, atol=1e-5)
        if n > 1:
            store.settle()


def check_slots(state):
    """No slot is lost or used twice."""
    used = []
    for store in state.stores:
        table = store.arena.table
        used += table[:, FINE:EXACT][table[:, FINE:EXACT] >= 0].tolist()
        exact = table[:, EXACT][table[:, EXACT] >= 0].tolist()
        assert sorted(exact + store.arena.exact.free) == list(range(store.arena.exact.slots))
    assert sorted(used + state.arena.free) == list(range(state.arena.slots))


def test_requests_of_many_lengths_read_what_caches_of_their_own_would(config):
    state = worker(config())
    s = Scheduler(state)
    s.add("a")
    s.add("b")
    s.step({"a": 200, "b": 5})
    s.add("c")
    s.step({"a": 56, "b": 1, "c": 130})
    for _ in range(70):
        s.step({"b": 1, "a": 1, "c": 1})
    s.finish("b")
    s.add("d")
    s.step({"c": 1, "d": 64, "a": 1})
    s.step({"d": 190})
    s.step({"d": 1, "c": 60})
    check_slots(state)
    assert state.stats()["requests"] == 3 and state.stats()["planes_shed"] == 0


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_of_requests_steps_and_rejected_tokens(config, data):
    state = worker(config())
    s = Scheduler(state, seed=data.draw(st.integers(0, 99)))
    started = 0
    for _ in range(data.draw(st.integers(5, 25))):
        if len(s.requests) < MOST and data.draw(st.booleans()):
            s.add(f"r{started}")
            started += 1
        names = [n for n in s.requests if data.draw(st.booleans())] or list(s.requests)
        if not names:
            continue
        decoding = data.draw(st.booleans())
        counts = {n: 1 if decoding else data.draw(st.integers(1, BUDGET // MOST)) for n in names}
        back = [n for n in names if s.requests[n].tokens > 1 and data.draw(st.integers(0, 3)) == 0]
        s.step(counts, back)
        check_slots(state)
        for name in [n for n, r in s.requests.items() if r.tokens > 300 or data.draw(st.integers(0, 9)) == 0]:
            s.finish(name)


def test_a_shared_prefix_is_read_by_those_who_find_it_with_what_it_still_has(config):
    state = worker(config())
    s = Scheduler(state, compare=False)
    s.add("a")
    s.step({"a": 200})
    prefix, rows = s.requests["a"].blocks[:3], s.requests["a"].rows
    s.add("b", rows, prefix, 192)
    s.step({"b": 10})
    arena = state.stores[0].arena
    first = [arena.cell(p, EXACT) for p in prefix]
    assert all(slot >= 0 for slot in first) and arena.counts[prefix].tolist() == [[2, 0], [2, 2], [2, 2]]
    s.finish("a")
    for _ in range(64):
        s.step({"b": 1})
    assert arena.counts[prefix].tolist() == [[1, 0], [1, 1], [1, 1]], "held by one"
    for _ in range(200):
        s.step({"b": 1})
    assert [arena.cell(p, EXACT) for p in prefix] == [first[0], -1, -1], "the first tokens stay exact"
    s.finish("b")
    s.add("c", rows, prefix, 192)
    s.step({"c": 1})
    assert state.stats()["hits"] == 6 and state.stats()["hits_below_tier"] == 0
    assert [arena.cell(p, EXACT) for p in prefix] == [first[0], -1, -1], "found again after nobody used it"
    check_slots(state)
    # What it reads is what was written: codes of the prefix, and its own row.
    layer = next(iter(state.layers.values()))
    store, basis = make_store(HEADS, DIM, tiers=(8, 4), window=WINDOW, profile=layer_profile(HEADS, DIM, seed=0))
    store.append(rows[0, :1, :, :192], rows[0, 1:, :, :192])
    store.append(rows[0, :1, :, 192:193], rows[0, 1:, :, 192:193])
    for page in store.sequences[0].pages[1:3]:
        store.shed_exact(page)
    q, chunk = torch.randn(1, 4, 1, DIM), (rows[0, :1, :, 192:193], rows[0, 1:, :, 192:193])
    at = state.requests.index["c"]
    got = attend(q, layer.store.view().of([at]), layer.basis, chunk)
    torch.testing.assert_close(got.out, attend(q, store.view(), basis, chunk).out, rtol=1e-5, atol=1e-6)


def test_blocks_used_anew_keep_nothing_of_before(config):
    state = worker(config())
    s = Scheduler(state)
    for name in "abcdefgh":
        s.add(name)
        s.step({name: 250})
        for _ in range(3):
            s.step({name: 1})
        s.finish(name)
        s.free.sort()
    check_slots(state)
    s.step({})
    assert state.stats()["requests"] == 0 and state.stats()["exact_used"] > 0, "kept for those who find them"


def test_a_request_that_lost_its_blocks_without_word_is_given_up(config):
    state = worker(config())
    s = Scheduler(state)
    s.add("a")
    s.add("b")
    s.step({"a": 100, "b": 30})
    gone = s.finish("a", tell=False)
    s.free = gone.blocks + s.free
    s.step({"b": 100})
    assert list(state.requests.index) == ["b"]
    check_slots(state)
    s.add("a", gone.rows)
    s.step({"a": 100, "b": 1})


def test_a_full_arena_sheds_planes_of_least_loss_and_serves_on(config):
    state = worker(config(), tiers=(8, 8), slabs=60)
    s = Scheduler(state, tiers=(8, 8), compare=False)
    for name in "abc":
        s.add(name)
        s.step({name: 256})
    for _ in range(130):
        s.step(dict.fromkeys("abc", 1))
    check_slots(state)
    stats = state.stats()
    assert stats["planes_shed"] > 0 and stats["arena_used"] <= 60
    assert 2 < stats["bits_history"] < 8
    losses = state.stores[0].arena.loss
    read = [(store.arena.table[:, FINEST] >= 0) for store in state.stores]
    assert any(bool(r.any()) for r in read), "not all are gone"
    assert bool(torch.isfinite(losses[state.stores[0].arena.table[:, TIER] > 0]).all())


def test_without_an_arena_pages_have_their_base_alone(config):
    state = worker(config(), tiers=(8, 8), slabs=0)
    s = Scheduler(state, tiers=(2, 2))
    s.add("a")
    s.step({"a": 256})
    for _ in range(80):
        s.step({"a": 1})
    assert state.stats()["planes_shed"] == 0 and state.arena.slots == 0
    check_slots(state)


def test_figures_reach_who_serves_them_and_calls_tell_what_was_wrong(config, tmp_path):
    state = worker(config())
    profile = Profile(
        [layer_profile(HEADS, DIM, seed=i) for i in range(LAYERS)], "m", "h", "balanced", [(2, 2)] * LAYERS
    )
    profile.save(state.config.profile)
    s = Scheduler(state, compare=False)
    s.add("a")
    s.step({"a": 256})
    for _ in range(200):
        s.step({"a": 1})
    path = tmp_path / "figures.json"
    assert read_stats(path) is None
    state.tell(path, 0)
    told = read_stats(path)
    assert told["requests"] == 1 and told["tokens"] == 456 and told["bits_average"] == 6.0
    layout = state.stores[0].layout
    assert told["bits_history"] == pytest.approx(layout.record_bytes / layout.slab_bytes + 4)
    state.tell(path.with_name("again.json"), 0)
    assert read_stats(path.with_name("again.json")) is None, "once a second"
    process = SimpleNamespace(lamina=state, rank=0)
    assert call(process, "stats")["arena_used"] == state.stats()["arena_used"] > 0
    assert "a tier is one of" in call(process, "set_tiers", 3)["error"]
    assert "no controller" in call(process, "freeze")["error"]
    assert call(process, "set_tiers", [4, 2]) is None and state.tiers == [(4, 2)] * LAYERS
    assert "not configured" in call(SimpleNamespace(), "stats")["error"]


def test_bytes_are_shared_out_over_blocks_arena_and_exact_rows():
    shapes = [LayerShape(i, 8, 0, 128) for i in range(36)]
    layout = shapes[0].layout
    assert layout.record_bytes == 38400 and layout.slab_bytes == 16384
    block, exact = 36 * 38400, 36 * 2 * 8 * 64 * 128 * 2
    base = sizes(80 * 10**9, shapes, 2, [(2, 2)] * 36, AUTO, 100)
    assert (base.blocks, base.slabs, base.exact_bytes) == ((80 * 10**9 - 100 * exact) // block, 0, exact)
    k4 = sizes(80 * 10**9, shapes, 2, [(4, 2)] * 36, AUTO, 100)
    assert k4.slabs == 36 * k4.blocks and k4.blocks == (80 * 10**9 - 100 * exact) // (block + 36 * 16384)
    own = sizes(80 * 10**9, shapes, 2, [(8, 8)] * 36, 10, 100)
    assert own.slabs == 10**10 // 16384 and own.blocks == (70 * 10**9 - 100 * exact) // block
    assert sizes(10**9, shapes, 2, [(2, 2)] * 36, AUTO, 10**6).exact_pages == 10**9 // (block + exact)
    with pytest.raises(ConfigError, match="hold no block"):
        sizes(10**9, shapes, 2, [(2, 2)] * 36, 1, 100)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"profil": "x"}, "names no profile"),
        ({"profile": "/nowhere"}, "no profile at /nowhere"),
        ({"profile": __file__, "tier": 2}, "unknown lamina setting 'tier'"),
        ({"profile": __file__, "arena_gb": -1}, "arena_gb=-1"),
        ({"profile": __file__, "arena_gb": "much"}, "arena_gb='much'"),
        ({"profile": __file__, "recent": 100}, "recent=100"),
        ({"profile": __file__, "controller": "on"}, "controller='on'"),
        ({"profile": __file__, "controller": {"policy": "best"}}, "unknown policy 'best'"),
        ({"profile": __file__, "controller": {"polcy": "vote"}}, "unknown controller setting 'polcy'"),
        ({"profile": __file__, "deterministic": True, "controller": {}}, "deterministic fixes"),
        ({"profile": __file__, "deterministic": True, "arena_gb": 1}, "deterministic sheds no plane"),
        ({"profile": __file__, "controller_state": "x"}, "controller_state needs"),
        ("x", "give an object"),
    ],
)
def test_wrong_settings_are_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        engine_config({"lamina": fields})


def test_settings_come_from_json():
    assert engine_config({}) is None and engine_config(None) is None
    found = engine_config({"lamina": {"profile": __file__, "tiers": [4, 2], "controller": {"target_bits": 3}}})
    assert found.tiers == (4, 2) and found.controller_settings().target_bits == 3
