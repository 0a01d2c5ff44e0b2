"""Pages in an engine's blocks, driven by what a scheduler says; no vLLM is needed for it."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import generator, layer_profile, make_store
from host import needs_compiler, needs_gpu, on_host
from lamina.attention.cuda import encode, rows
from lamina.attention.dispatch import attend
from lamina.basis.profile import Profile
from lamina.engines.vllm import state as state_module
from lamina.engines.vllm.closing import CudaCloser, TorchCloser
from lamina.engines.vllm.config import AUTO, EngineConfig, engine_config
from lamina.engines.vllm.metrics_file import read_stats
from lamina.engines.vllm.sizes import LayerShape, exact_pages, sizes
from lamina.engines.vllm.state import Model, WorkerState
from lamina.engines.vllm.worker import call
from lamina.errors import ConfigError
from lamina.pages import WindowConfig
from lamina.pages.table import EXACT, FINE, FINEST, START, TIER

HEADS, DIM, LAYERS = 2, 32, 2
BLOCKS, MOST, BUDGET, DRAFTS = 40, 4, 256, 3
WINDOW = WindowConfig(64, 128, 0)


@pytest.fixture
def config(tmp_path):
    def make(device="cpu", **fields):
        path = tmp_path / "model.profile"
        path.touch()
        return EngineConfig(str(path), sink=64, recent=128, **fields), device

    return make


WAYS = ["torch", pytest.param("kernels", marks=needs_compiler), pytest.param("cuda", marks=needs_gpu)]


@pytest.fixture(params=WAYS)
def config_of_both(request, config, monkeypatch):
    """Rows and codes are written in torch, or by the GPU's kernels, on the host or on a GPU."""
    if request.param == "kernels":
        on_host(monkeypatch, encode)
        on_host(monkeypatch, rows)
        monkeypatch.setattr(encode, "most_shared", lambda device: 227 * 1024)
        monkeypatch.setattr(state_module, "closer_of", CudaCloser)
    return partial(config, device="cuda") if request.param == "cuda" else config


def worker(made, tiers=(8, 4), slabs=None):
    """A worker's state, whose blocks start as noise."""
    config, device = made
    layers = [layer_profile(HEADS, DIM, seed=i) for i in range(LAYERS)]
    profile = Profile(layers, "model", "hash", "balanced", [tiers] * LAYERS)
    shapes = [LayerShape(i, HEADS, 0, DIM) for i in range(LAYERS)]
    most = exact_pages(WINDOW, MOST, BUDGET, 1 + DRAFTS)
    shares = sizes(10**9, shapes, 4, [tiers] * LAYERS, AUTO, most)
    shares.__dict__.update(blocks=BLOCKS, slabs=BLOCKS * 8 if slabs is None else slabs)
    records = [
        torch.randint(0, 256, (BLOCKS, shape.layout.record_bytes), dtype=torch.uint8, generator=generator(7)).to(device)
        for shape in shapes
    ]
    model = Model(profile, shapes, [DIM**-0.5] * LAYERS, torch.float32, 2 * HEADS, MOST, 1 + DRAFTS)
    return WorkerState(config, model, records, shares, [tiers] * LAYERS)


class Scheduler:
    """Hands out blocks and feeds rows, as an engine does; a reference store a request and layer is fed the same."""

    def __init__(self, state, tiers=(8, 4), seed=0, compare=True):
        self.state, self.tiers, self.compare = state, tiers, compare
        self.free = list(range(1, BLOCKS))
        self.g = generator(seed)
        self.requests, self.finished = {}, set()

    def add(self, name, rows=None, blocks=(), tokens=0):
        """Start a request whose first ``tokens`` tokens are in ``blocks`` already."""
        given = torch.randn(LAYERS, 2, HEADS, 1024, DIM, generator=self.g) if rows is None else rows
        stores = [
            make_store(HEADS, DIM, tiers=self.tiers, window=WINDOW, profile=layer_profile(HEADS, DIM, seed=i))
            for i in range(LAYERS)
        ]
        for (store, _), of_layer in zip(stores, given):
            if tokens and self.compare:
                store.append(of_layer[:1, :, :tokens], of_layer[1:, :, :tokens])
                store.settle()
        self.requests[name] = SimpleNamespace(
            rows=given, blocks=list(blocks), shared=len(blocks), tokens=tokens, new=True, stores=stores
        )

    def finish(self, name, tell=True):
        request = self.requests.pop(name)
        self.free += request.blocks[request.shared :]
        if tell:
            self.finished.add(name)
        return request

    def begin(self, counts, drafts):
        """Tell the state of a step."""
        new, running, blocks_of = [], [], {}
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
            scheduled_spec_decode_tokens={name: [0] * n for name, n in drafts.items()},
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[n for n, _ in running], resumed_req_ids=set(), num_computed_tokens=[t for _, t in running],
                new_block_ids=[blocks_of[n] for n, _ in running],
            ),
        )  # fmt: skip
        self.state.begin_step(output)
        self.finished = set()

    def step(self, counts, drafts=None, accepted=None):
        """Feed so many tokens of each request, of which the last ``drafts`` are taken back but for ``accepted``."""
        drafts, accepted = drafts or {}, accepted or {}
        self.begin(counts, drafts)
        if not counts:
            return
        batch = [(name, self.requests[name], n) for name, n in counts.items()]
        lengths = torch.tensor([r.tokens + n for _, r, n in batch], dtype=torch.int32)
        width = max(len(r.blocks) for _, r, _ in batch)
        ids = torch.tensor([r.blocks + [-1] * (width - len(r.blocks)) for _, r, _ in batch], dtype=torch.int32)
        slots = torch.tensor(
            [r.blocks[t // 64] * 64 + t % 64 for _, r, n in batch for t in range(r.tokens, r.tokens + n)]
        )
        device = self.state.pages.device
        for i in range(LAYERS):
            view = self.state.view(i, ids.to(device), lengths.to(device))
            fed = [r.rows[i, :, :, r.tokens : r.tokens + n] for _, r, n in batch]
            k, v = (torch.cat([x[side] for x in fed], 1).transpose(0, 1).contiguous() for side in (0, 1))
            self.state.closer.write(i, k.to(device), v.to(device), slots.to(device), view)
            for b, ((name, _, _), x) in enumerate(zip(batch, fed)):
                self.check(i, name, view.only(b), x)
        for name, r, n in batch:
            gone = drafts.get(name, 0) - accepted.get(name, 0)
            r.tokens += n - gone
            for store, _ in r.stores if gone and self.compare else ():
                store.crop([r.tokens])

    def check(self, i, name, view, given):
        """Attention reads what a store of the request's own would."""
        if not self.compare:
            return
        store, basis = self.requests[name].stores[i]
        k, v = given[:, None]
        store.append(k, v)
        q = torch.randn(1, 2 * HEADS, k.shape[2], DIM, generator=self.g)
        want, device = attend(q, store.view(), basis, (k, v)), view.records.device
        got = attend(q.to(device), view, self.state.bases[i], (k.to(device), v.to(device)))
        # Kernels divide faster than exactly, which moves a code here and there.
        near = {"rtol": 1e-5, "atol": 1e-5} if isinstance(self.state.closer, TorchCloser) else {"rtol": 0, "atol": 2e-3}
        torch.testing.assert_close(got.out.cpu(), want.out, **near)
        torch.testing.assert_close(got.lse.cpu(), want.lse, **near)
        if k.shape[2] > 1:
            store.settle()


def check_slabs(pages):
    """No slot of the arena is lost or used twice."""
    used = pages.cells[:, :, FINE:EXACT][pages.cells[:, :, FINE:EXACT] >= 0].tolist()
    assert sorted(used + pages.free_slabs.free) == list(range(pages.free_slabs.size))


def check_slots(state):
    """No slot is lost or used twice, counts are right, and layers differ in planes alone."""
    pages, cells = state.pages, state.pages.cells
    check_slabs(pages)
    assert (pages.planes == (cells[:, :, FINE:EXACT] >= 0).sum((0, 2))).all()
    exact = cells[0, :, EXACT][cells[0, :, EXACT] >= 0].tolist()
    assert sorted(exact + pages.free_exact.free) == list(range(pages.free_exact.size))
    assert (cells[0][:, [START, EXACT]] == cells[1][:, [START, EXACT]]).all()
    held = [p for r in state.requests.values() for p in r.held]
    users = [p for r in state.requests.values() for p in r.blocks[: r.opened]]
    for page in range(BLOCKS):
        assert (pages.users[page], pages.holders[page]) == (users.count(page), held.count(page))
    assert not set(pages.idle) & set(users)
    past = (cells[0, :, START] >= WINDOW.sink) & (cells[0, :, TIER] > 0) & (cells[0, :, EXACT] >= 0)
    assert not (past & (pages.users > 0) & (pages.holders == 0)).any(), "exact rows that nobody needs"


def test_requests_of_many_lengths_read_what_caches_of_their_own_would(config_of_both):
    state = worker(config_of_both())
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
def test_any_order_of_requests_steps_and_rejected_tokens(config_of_both, data):
    state = worker(config_of_both())
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
        drafts = {n: data.draw(st.integers(0, DRAFTS)) for n in names if decoding and s.requests[n].tokens}
        counts = {n: 1 + drafts.get(n, 0) if decoding else data.draw(st.integers(1, BUDGET // MOST)) for n in names}
        s.step(counts, drafts, {n: data.draw(st.integers(0, d)) for n, d in drafts.items()})
        check_slots(state)
        for name in [n for n, r in s.requests.items() if r.tokens > 300 or data.draw(st.integers(0, 9)) == 0]:
            s.finish(name)


def test_a_shared_prefix_is_read_by_those_who_find_it_with_what_it_still_has(config):
    state = worker(config())
    s = Scheduler(state, compare=False)
    s.add("a")
    s.step({"a": 200})
    prefix, given = s.requests["a"].blocks[:3], s.requests["a"].rows
    s.add("b", given, prefix, 192)
    s.step({"b": 10})
    pages = state.pages

    def counts():
        return [(int(pages.users[p]), int(pages.holders[p])) for p in prefix]

    first = [pages.exact_slot(p) for p in prefix]
    assert all(slot >= 0 for slot in first) and counts() == [(2, 0), (2, 2), (2, 2)]
    s.finish("a")
    for _ in range(53):
        s.step({"b": 1})
    assert counts() == [(1, 0), (1, 1), (1, 1)], "held by one"
    for _ in range(200):
        s.step({"b": 1})
    assert [pages.exact_slot(p) for p in prefix] == [first[0], -1, -1], "the first tokens stay exact"
    s.finish("b")
    s.add("c", given, prefix, 192)
    s.step({"c": 1})
    assert state.stats()["hits"] == 6 and state.stats()["hits_below_tier"] == 0
    assert [pages.exact_slot(p) for p in prefix] == [first[0], -1, -1], "found again after nobody used it"
    check_slots(state)
    # What it reads is what was written: codes of the prefix, and its own row.
    store, basis = make_store(HEADS, DIM, tiers=(8, 4), window=WINDOW, profile=layer_profile(HEADS, DIM, seed=0))
    store.append(given[0, :1, :, :192], given[0, 1:, :, :192])
    store.append(given[0, :1, :, 192:193], given[0, 1:, :, 192:193])
    for page in store.sequences[0].pages[1:3]:
        store.shed_exact(page)
    q, chunk = torch.randn(1, 4, 1, DIM), (given[0, :1, :, 192:193], given[0, 1:, :, 192:193])
    ids = torch.tensor([s.requests["c"].blocks], dtype=torch.int32)
    got = attend(q, state.view(0, ids, torch.tensor([193], dtype=torch.int32)), state.bases[0], chunk)
    torch.testing.assert_close(got.out, attend(q, store.view(), basis, chunk).out, rtol=1e-5, atol=1e-6)


def test_blocks_that_another_request_fills_in_the_same_step_are_found(config_of_both):
    state = worker(config_of_both())
    s = Scheduler(state)
    s.add("a")
    a = s.requests["a"]
    s.step({"a": 63})
    a.blocks += [s.free.pop(0), s.free.pop(0)]
    s.state.requests["a"].blocks += a.blocks[1:]
    s.add("b", a.rows, a.blocks[:2], 128)
    s.step({"a": 100, "b": 7})
    s.step({"a": 1, "b": 1})
    check_slots(state)


def test_blocks_that_decoding_fills_close_for_a_prompt_that_finds_them_at_once(config_of_both):
    state = worker(config_of_both())
    s = Scheduler(state)
    s.add("a")
    a = s.requests["a"]
    s.step({"a": 126})
    s.step({"a": 1})
    s.add("b", a.rows, a.blocks[:2], 128)
    s.step({"a": 1, "b": 200})
    assert not state.pages.is_open(a.blocks[1]) and state.requests["a"].closed == 2
    # Where all decode, nothing closes within a step.
    s.step({"a": 63, "b": 1})
    s.add("c", a.rows, a.blocks[:3], 192)
    s.step({"a": 1, "c": 1})
    assert state.pages.is_open(a.blocks[2])
    s.step({"a": 1, "b": 1, "c": 1})
    assert not state.pages.is_open(a.blocks[2])
    check_slots(state)


def scheduled(counts, new=(), running=(), resumed=()):
    """A step as a scheduler tells it: requests as (name, blocks, tokens computed)."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=n, block_ids=(blocks,), num_computed_tokens=t) for n, blocks, t in new
        ],
        finished_req_ids=set(), preempted_req_ids=None, num_scheduled_tokens=counts,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[n for n, _, _ in running], resumed_req_ids=set(resumed),
            new_block_ids=[None if blocks is None else (blocks,) for _, blocks, _ in running],
            num_computed_tokens=[t for _, _, t in running],
        ),
    )  # fmt: skip


@pytest.mark.parametrize("as_new", [True, False])
def test_who_starts_may_find_blocks_of_who_starts_again_whatever_their_order(config, as_new):
    """New requests are named before those that were preempted, be they told as new ones or as resumed ones."""
    state = worker(config())
    again, finder = ("r", [1, 2, 3], 0), ("n", [1, 2, 4], 128)
    if as_new:
        state.begin_step(scheduled({"n": 22, "r": 150}, new=[finder, again]))
    else:
        state.begin_step(scheduled({"n": 22, "r": 150}, new=[finder], running=[again], resumed=["r"]))
    assert state.pages.users[1:5].tolist() == [2, 2, 1, 1]
    check_slots(state)


def test_a_request_that_starts_again_with_blocks_of_others_leaves_them_theirs(config):
    state = worker(config())
    state.begin_step(scheduled({"a": 200}, new=[("a", [1, 2, 3, 4], 0)]))
    state.begin_step(scheduled({"r": 72}, new=[("r", [1, 2, 5, 6], 128)]))
    state.begin_step(scheduled({"r": 73}, running=[("r", [1, 2, 5, 6], 128)], resumed=["r"]))
    assert sorted(state.requests) == ["a", "r"]
    state.begin_step(scheduled({"a": 1}, running=[("a", None, 200)]))
    check_slots(state)


def test_prompts_that_grow_do_not_use_up_exact_rows(config):
    state = worker(config())
    s = Scheduler(state, compare=False)
    blocks, rows = [], None
    for k in range(1, 4):
        s.add(f"p{k}", rows, blocks, 256 * (k - 1))
        request = s.requests[f"p{k}"]
        rows = request.rows
        s.step({f"p{k}": 257})
        check_slots(state)
        blocks = request.blocks[: 4 * k]
        request.shared = len(request.blocks)
        s.finish(f"p{k}")


def test_planes_of_rows_that_are_not_finite_are_shed_as_planes(config):
    state = worker(config(), (8, 8), slabs=60)
    pages = state.pages
    pages.open([1, 2, 3], [0, 64, 128], [True] * 3, [False] * 3)
    pages.close([1, 2, 3], state.tiers)
    pages.loss[:] = torch.tensor([float("nan"), float("inf")])
    assert pages.shed(60, lambda cost: cost) == 24 and pages.free_slabs.used == 0
    check_slabs(pages)


def test_what_was_filled_last_is_encoded_before_a_request_loses_its_blocks(config):
    state = worker(config())
    s = Scheduler(state)
    s.add("a")
    given = s.requests["a"].rows
    s.step({"a": 63})
    s.step({"a": 1})
    (block,) = s.requests["a"].blocks
    assert state.pages.is_open(block), "it closes when the next step begins"
    s.finish("a")
    s.add("b", given, [block], 64)
    s.step({"b": 5})
    assert not state.pages.is_open(block)


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
    assert list(state.requests) == ["b"]
    check_slots(state)
    s.add("a", gone.rows)
    s.step({"a": 100, "b": 1})


def test_a_request_that_goes_back_into_what_is_encoded_is_an_error(config):
    s = Scheduler(worker(config()), compare=False)
    s.add("a")
    s.step({"a": 200})
    s.requests["a"].tokens = 100
    with pytest.raises(RuntimeError, match="goes back to token 100, but 192 are encoded"):
        s.step({"a": 1})


@pytest.mark.parametrize("tiers", [(8, 8), (4, 8)])
def test_a_full_arena_sheds_planes_of_least_loss_and_serves_on(config_of_both, tiers):
    state = worker(config_of_both(), tiers, slabs=60)
    s = Scheduler(state, tiers, compare=False)
    for name in "abc":
        s.add(name)
        s.step({name: 256})
    for _ in range(130):
        s.step(dict.fromkeys("abc", 1))
        check_slots(state)
    stats = state.stats()
    assert stats["planes_shed"] > 0 and stats["arena_used"] <= 60
    assert 2 < stats["bits_history"] < 8
    cells, loss = state.pages.table, state.pages.loss
    assert bool((cells[..., FINE : FINE + 2] >= 0).any()), "not all are gone"
    written = (cells[..., TIER] > 0) & (torch.from_numpy(state.pages.users) > 0)
    assert bool(torch.isfinite(loss[written]).all()) and bool((loss[written] > 0).any())


def test_planes_of_least_loss_go_first_and_ties_by_layer_and_page(config):
    state = worker(config(), (8, 4))
    pages, seen = state.pages, []
    pages.open([1, 2, 3], [0, 64, 128], [True] * 3, [False] * 3)
    pages.close([1, 2, 3], state.tiers)
    pages.loss[:] = 1.0
    pages.loss[1, 2, 0, 1] = 0.5  # what dropping the finest plane of K costs in the last layer
    pages.loss[0, 3, 1, 0] = 0.25  # what dropping V's only plane costs in the first
    assert pages.shed(3, lambda cost: seen.append(cost) or cost) == 3
    assert [c.shape for c in seen] == [(LAYERS, BLOCKS, 2)] and int(torch.isfinite(seen[0]).sum()) == 12
    table = pages.table
    assert table[0, 3, FINE + 1] == -1 and table[1, 2, FINEST] == -1 and table[1, 2, FINE] >= 0
    assert table[0, 1, FINEST] == -1, "the first of those alike"
    assert pages.free_slabs.used == 3 * LAYERS * 4 - 5
    assert pages.below_tier([1, 2, 3]) == 3
    check_slabs(pages)


def test_without_an_arena_pages_have_their_base_alone(config):
    state = worker(config(), tiers=(8, 8), slabs=0)
    s = Scheduler(state, tiers=(2, 2))
    s.add("a")
    s.step({"a": 256})
    for _ in range(80):
        s.step({"a": 1})
    assert state.stats()["planes_shed"] == 0 and state.stats()["arena_slots"] == 0
    check_slots(state)


def test_rows_that_are_not_finite_are_counted_and_reach_nobody_else(config_of_both, monkeypatch):
    state = worker(config_of_both())
    s = Scheduler(state)
    s.add("a")
    s.add("b")
    s.requests["a"].rows[0, 0, 1, 100, 3] = float("nan")
    check = s.check
    monkeypatch.setattr(s, "check", lambda i, name, *given: check(i, name, *given) if name == "b" else None)
    s.step({"a": 130, "b": 70})
    s.step({"a": 1, "b": 1})
    assert state.stats()["non_finite"] == 1


def test_figures_reach_who_serves_them_and_calls_tell_what_was_wrong(config, tmp_path):
    state = worker(config())
    state.model.profile.save(state.config.profile)
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
    layout = state.pages.layout
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
    assert layout.record_bytes == 38016 and layout.slab_bytes == 16384
    block, exact = 36 * (38016 + 60), 36 * 2 * 8 * 64 * 128 * 2
    base = sizes(80 * 10**9, shapes, 2, [(2, 2)] * 36, AUTO, 100)
    assert (base.blocks, base.slabs, base.exact_bytes) == ((80 * 10**9 - 100 * exact) // block, 0, exact)
    k4 = sizes(80 * 10**9, shapes, 2, [(4, 2)] * 36, AUTO, 100)
    assert k4.slabs == 36 * k4.blocks and k4.blocks == (80 * 10**9 - 100 * exact) // (block + 36 * 16384)
    assert sizes(80 * 10**9, shapes, 2, [(2, 2)] * 36, AUTO, 100, 3.0) == k4, "room for what a controller aims at"
    assert sizes(80 * 10**9, shapes, 2, [(8, 8)] * 36, AUTO, 100, 3.0).slabs % (6 * 36) == 0
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
