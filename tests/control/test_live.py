"""A controller at work in a real cache: when it fires, what it decides, what pages get of it, and what survives."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.codec import TIERS
from lamina.control.config import ControllerConfig
from lamina.control.state import Controller, Firing, merge_tiers
from lamina.engines.hf import LaminaCache, cache_kwarg
from lamina.errors import ConfigError
from lamina.pages import WindowConfig
from tiny_models import build, logits_of, profile_of, tokens

WINDOW = WindowConfig(recent=64)
OFTEN = ControllerConfig(rate=1 / 4, policy="threshold", tau0=0.02)  # type: ignore[arg-type]


def cache_of(model: Any, controller: Any, **kwargs: Any) -> LaminaCache:
    return LaminaCache(model, profile_of("Llama"), window=WINDOW, controller=controller, **kwargs)


def decode(model: Any, cache: LaminaCache, ids: Tensor, start: int) -> Tensor:
    steps = [logits_of(model, ids[:, t : t + 1], **cache_kwarg(model, cache)) for t in range(start, ids.shape[1])]
    return torch.cat(steps, 1)


def run(controller: Any, n: int = 500, batch: int = 1, **kwargs: Any) -> tuple[LaminaCache, list[Firing], Tensor]:
    """A prompt of 400 tokens and single tokens up to ``n``."""
    model, ids = build("Llama"), tokens(batch, n)
    cache = cache_of(model, controller, **kwargs)
    heard: list[Firing] = []
    assert cache.control is not None
    cache.control.on_firing = heard.append
    logits_of(model, ids[:, :400], **cache_kwarg(model, cache))
    return cache, heard, decode(model, cache, ids, 400)


def page_tiers(cache: LaminaCache) -> list[list[tuple[int, int]]]:
    """Tiers of the closed pages of the first sequence, by layer."""
    found = []
    for layer in cache.ours:
        rows = layer.store.arena.table[layer.store.sequences[0].pages].tolist()
        found.append([(row[2], row[3]) for row in rows if row[2]])
    return found


def test_it_fires_on_decode_steps_at_its_rate() -> None:
    _, heard, _ = run(OFTEN)
    assert [f.step for f in heard] == list(range(4, 101, 4))
    assert [f.context for f in heard] == [400 + f.step for f in heard]
    for firing in heard:
        assert len(firing.signals) == 4 and all(len(row) == 3 for row in firing.signals)
        assert all(math.isfinite(x) and x >= 0 for row in firing.signals for x in row)
        assert all(row[0] > row[1] > row[2] for row in firing.signals), "fewer bits, more drift"


def test_pages_closed_later_take_the_decision_and_earlier_ones_keep_theirs() -> None:
    tight = ControllerConfig(rate=1 / 4, policy="threshold", tau0=1e-9)  # type: ignore[arg-type]
    cache, heard, _ = run(tight)
    assert heard[-1].tiers == [(8, 8)] * 2 == list(cache.tiers)
    for tiers in page_tiers(cache):
        assert tiers[:6] == [(2, 2)] * 6 and tiers[6:] == [(8, 8)]
    loose, heard, _ = run(ControllerConfig(rate=1 / 4, policy="threshold", tau0=1e9))  # type: ignore[arg-type]
    assert set(loose.tiers) == {(2, 2)}


def test_the_average_of_an_allocation_is_the_target() -> None:
    config = ControllerConfig(rate=1 / 4, policy="allocate", target_bits=4.0)  # type: ignore[arg-type]
    cache, heard, _ = run(config)
    assert heard and cache.controller is not None
    assert 3 <= cache.controller.average_bits <= 4 and set(cache.tiers) != {(2, 2)}


def test_the_moving_average_starts_with_the_first_sample() -> None:
    _, heard, _ = run(OFTEN, n=420)
    for side in range(4):
        ema = heard[0].signals[side]
        assert heard[0].ema[side] == ema
        for firing in heard[1:]:
            ema = [a + 0.1 * (b - a) for a, b in zip(ema, firing.signals[side])]
            assert firing.ema[side] == pytest.approx(ema)


@pytest.mark.parametrize("canary", ["anchored", "ring"])
def test_the_same_run_makes_the_same_decisions(canary: str) -> None:
    config = ControllerConfig(canary=canary, rate=1 / 4, schedule="bernoulli", policy="vote", seed=3, tau0=0.02)  # type: ignore[arg-type]
    (_, first, a), (_, second, b) = run(config), run(config)
    assert first == second and len(first) > 10 and torch.equal(a, b)


def test_a_run_that_is_interrupted_goes_on_as_if_it_were_not(tmp_path: Path) -> None:
    config = ControllerConfig(rate=1 / 8, policy="hysteresis", tau0=0.01, patience=2, dwell=1)  # type: ignore[arg-type]
    whole, heard, logits = run(config, n=600)
    part, before, first = run(config, n=500)
    part.save(tmp_path / "cache")
    assert part.controller is not None
    state = json.loads(json.dumps(part.controller.snapshot()))
    model = build("Llama")
    controller = Controller(config, [(8, 8)] * 2)
    controller.load(state)
    again = LaminaCache.load(tmp_path / "cache", model, profile_of("Llama"), controller=controller)
    assert again.control is not None
    again.control.on_firing = before.append
    rest = decode(model, again, tokens(1, 600), 500)
    assert torch.equal(torch.cat([first, rest], 1), logits)
    assert [f.tiers for f in before] == [f.tiers for f in heard]
    assert page_tiers(again) == page_tiers(whole)


def test_the_state_goes_on_in_the_next_request_and_freezes() -> None:
    controller = Controller(OFTEN, [(2, 2)] * 2)
    run(controller)
    decided, step = list(controller.tiers), controller.step
    cache, heard, _ = run(controller, n=401)
    assert list(cache.tiers) == decided and controller.step == step + 1 and not heard
    controller.freeze()
    _, heard, _ = run(controller)
    assert not heard and controller.tiers == decided


def test_dummy_rows_and_short_sequences_feed_nothing() -> None:
    model = build("Llama")
    cache = cache_of(model, ControllerConfig(rate=1.0))
    heard: list[Firing] = []
    assert cache.control is not None
    cache.control.on_firing = heard.append
    ids = tokens(1, 150)
    logits_of(model, ids[:, :100], **cache_kwarg(model, cache))
    decode(model, cache, ids, 100)
    assert not heard, "nothing is packed yet"
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.zero_()
    zero, heard, _ = run_with(model)
    assert not heard and set(zero.tiers) == {(2, 2)}


def run_with(model: Any) -> tuple[LaminaCache, list[Firing], Tensor]:
    cache, heard, ids = cache_of(model, ControllerConfig(rate=1.0)), [], tokens(1, 430)
    assert cache.control is not None
    cache.control.on_firing = heard.append
    logits_of(model, ids[:, :400], **cache_kwarg(model, cache))
    return cache, heard, decode(model, cache, ids, 400)


def test_it_looks_as_soon_as_something_is_packed_and_not_before() -> None:
    """Windows of 64 + 64: at 193 tokens the second page is read as codes."""
    model, ids = build("Llama"), tokens(1, 200)
    cache, heard = cache_of(model, ControllerConfig(rate=1.0)), []
    assert cache.control is not None
    cache.control.on_firing = heard.append
    logits_of(model, ids[:, :180], **cache_kwarg(model, cache))
    decode(model, cache, ids, 180)
    assert [f.context for f in heard] == list(range(193, 201))


def test_signals_do_not_depend_on_how_tokens_come() -> None:
    """One token (compiled) or a chunk (torch) at the same place: the same signals, the newest token's."""
    found = []
    for chunk in (1, 20):
        model, ids = build("Llama"), tokens(1, 420)
        cache = cache_of(model, ControllerConfig(rate=1.0), tiers=4)
        heard: list[Firing] = []
        assert cache.control is not None
        cache.control.on_firing = heard.append
        logits_of(model, ids[:, :400], **cache_kwarg(model, cache))
        for t in range(400, 420, chunk):
            logits_of(model, ids[:, t : t + chunk], **cache_kwarg(model, cache))
        found.append(heard)
    assert len(found[0]) == 20 and len(found[1]) == 1
    for one, many in zip(found[0][-1].signals, found[1][-1].signals):
        assert one == pytest.approx(many, rel=1e-3)


def test_ring_needs_its_keys() -> None:
    with pytest.raises(ConfigError, match="the ring canary needs the last 64 keys exactly"):
        LaminaCache(
            build("Llama"), profile_of("Llama"), window=WindowConfig(0, 0, 0),
            controller=ControllerConfig(canary="ring"),  # type: ignore[arg-type]
        )  # fmt: skip


def test_controllers_that_do_not_fit_are_refused() -> None:
    model = build("Llama")
    for wrong, message in ((Controller(OFTEN, [(2, 2)] * 3), "has 3 layers, the model 2"), ("x", "controller is 'x'")):
        with pytest.raises(ConfigError, match=message):
            cache_of(model, wrong)
    with pytest.raises(ConfigError, match="the controller decides the tiers"):
        cache_of(model, OFTEN).tiers = 4
    controller = Controller(OFTEN, [(2, 2)] * 2)
    for broken in ({}, {"format": "lamina-controller"}, Controller(OFTEN, [(2, 2)]).snapshot()):
        with pytest.raises(ConfigError, match=r"snapshot"):
            controller.load(broken)
    for field, value in (
        ("canary", "x"), ("rate", 0.0), ("rate", 2.0), ("alpha", 0), ("tiers", ()), ("tiers", (3,)), ("fallback", 5),
        ("tau0", 0), ("dwell", -1), ("target_bits", 9.0), ("policy", "none"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=field):
            ControllerConfig(**{field: value})


def test_every_rank_decides_alike_on_averaged_signals() -> None:
    """Two ranks with different signals and one reduction between them."""
    from lamina.control.canary import Signals

    def signals(scale: float) -> dict[int, Signals]:
        return {i: Signals({b: scale / b**3 for b in TIERS}, {b: scale / b**4 for b in TIERS}) for i in range(2)}

    seen: dict[int, list[list[float]]] = {}

    def averaged(rank: int) -> Any:
        def reduce(table: list[list[float]]) -> list[list[float]]:
            seen[rank] = table
            other = seen.get(1 - rank, table)
            return [[(a + b) / 2 for a, b in zip(x, y)] for x, y in zip(table, other)]

        return reduce

    ranks = [Controller(OFTEN, [(2, 2)] * 2, reduce=averaged(r)) for r in (0, 1)]
    seen[1] = ranks[1]._table(signals(3.0))
    first = ranks[0].decide(signals(0.1), 100)
    second = ranks[1].decide(signals(3.0), 100)
    assert first is not None and second is not None and first.signals == second.signals and first.tiers == second.tiers
    assert merge_tiers([[(2, 4)], [(4, 4)], [(8, 2)]]) == [(8, 4)]


def test_a_rank_that_measured_nothing_reduces_with_the_others() -> None:
    from lamina.control.canary import Signals

    tables: list[Any] = []

    def reduce(table: Any) -> Any:
        tables.append(table)
        return table

    controller = Controller(OFTEN, [(2, 2)] * 2, reduce=reduce)
    found = Signals(*({b: 1 / b**3 for b in TIERS} for _ in "kv"))
    assert controller.decide({}, 100) is None and not any(track.ema for track in controller.tracks)
    firing = controller.decide({1: found}, 100)
    assert [[len(row) for row in table] for table in tables] == [[3] * 4] * 2, "as many numbers on every rank"
    assert firing is not None and [bool(track.ema) for track in controller.tracks] == [False, False, True, True]


def test_a_listener_that_fails_leaves_the_cache_whole() -> None:
    model, ids = build("Llama"), tokens(1, 450)
    cache, clean = (cache_of(model, OFTEN) for _ in range(2))

    def full(event: dict[str, Any]) -> None:
        raise OSError(28, "no space left")

    cache.listeners.append(full)
    with pytest.raises(OSError, match="no space left"):
        logits_of(model, ids[:, :400], **cache_kwarg(model, cache))
    assert {layer.seen for layer in cache.ours} == {400} and cache.lengths == [400]
    cache.listeners.clear()
    logits_of(model, ids[:, :400], **cache_kwarg(model, clean))
    assert torch.equal(decode(model, cache, ids, 400), decode(model, clean, ids, 400))


def test_signals_that_are_not_finite_are_left_out() -> None:
    from lamina.control.canary import Signals

    good = Signals({2: 0.1, 4: 0.01, 8: 0.001}, {2: 0.1, 4: 0.01, 8: 0.001})
    bad = Signals({2: math.nan, 4: 0.01, 8: 0.001}, {2: math.inf, 4: 0.01, 8: 0.001})
    controller = Controller(OFTEN, [(2, 2)] * 2)
    first = controller.decide({0: bad, 1: good}, 100)
    assert first is not None and first.ema[0] == first.ema[1] == [] and first.ema[2] == [0.1, 0.01, 0.001]
    second = controller.decide({0: good, 1: bad}, 100)
    assert second is not None and second.ema == [[0.1, 0.01, 0.001]] * 4


def test_a_copied_cache_has_a_controller_of_its_own() -> None:
    model, ids = build("Llama"), tokens(1, 460)
    cache = cache_of(model, OFTEN)
    logits_of(model, ids[:, :400], **cache_kwarg(model, cache))
    decode(model, cache, ids[:, :450], 400)
    other = copy.deepcopy(cache)
    assert cache.controller is not None and other.controller is not None
    assert other.controller.snapshot() == cache.controller.snapshot()
    step = cache.controller.step
    decode(model, other, ids, 450)
    assert cache.controller.step == step and other.controller.step == step + 10


@pytest.mark.parametrize(
    "change",
    [
        {"random": [3, [1, 2], None]},
        {"step": math.inf},
        {"frozen": "false"},
        {"tiers": [[2.0, 3.0]] * 2},
        {"tracks": [{"ema": {"2": math.nan, "4": 0.1, "8": 0.1}}] * 4},
        {"tracks": [{"ema": {"2": 0.1}}] * 4},
        {"tracks": [{"kept": None}] * 4},
        {"tracks": [{"decisions": ["x"]}] * 4},
    ],
    ids=lambda c: next(iter(c)),
)
def test_a_damaged_snapshot_changes_nothing(change: dict[str, Any]) -> None:
    controller = Controller(OFTEN, [(2, 4)] * 2)
    before = controller.snapshot()
    with pytest.raises(ConfigError):
        controller.load({**json.loads(json.dumps(before)), **change})
    assert controller.snapshot() == before


@pytest.mark.parametrize("table", [None, [], [[0.1, 0.1]] * 4, [["a", "b", "c"]] * 4, [[0.1, 0.1, 0.1]] * 3])
def test_a_reduction_of_another_shape_is_refused(table: Any) -> None:
    from lamina.control.canary import Signals

    good = Signals({2: 0.1, 4: 0.01, 8: 0.001}, {2: 0.1, 4: 0.01, 8: 0.001})
    controller = Controller(OFTEN, [(2, 2)] * 2, reduce=lambda _: table)
    with pytest.raises(ConfigError, match="reduction of signals returned"):
        controller.decide({0: good, 1: good}, 100)


def test_tiers_that_are_frozen_can_be_set() -> None:
    cache, _, _ = run(OFTEN, n=450)
    with pytest.raises(ConfigError, match="freeze it first"):
        cache.tiers = 4
    assert cache.controller is not None
    cache.controller.freeze()
    cache.tiers = 4
    assert cache.tiers == ((4, 4), (4, 4)) == tuple(cache.controller.tiers)


def test_long_drafts_count_as_decoding() -> None:
    model, ids = build("Llama"), tokens(1, 500)
    cache = cache_of(model, OFTEN)
    heard: list[Firing] = []
    assert cache.control is not None
    cache.control.on_firing = heard.append
    logits_of(model, ids[:, :400], **cache_kwarg(model, cache))
    for part in ids[:, 400:].split(20, 1):
        logits_of(model, part, **cache_kwarg(model, cache))
    assert [f.step for f in heard] == [20, 40, 60, 80, 100]


def test_the_ring_says_nothing_when_its_keys_were_shed() -> None:
    """One key left has a softmax of 1 whatever its bits: a drift of 0 that would demote every layer."""
    model, ids = build("Llama"), tokens(1, 260)
    window = WindowConfig(64, 64, 0)
    config = ControllerConfig(rate=1.0, canary="ring", policy="threshold", tau0=0.02)  # type: ignore[arg-type]
    cache = LaminaCache(model, profile_of("Llama"), window=window, controller=config)
    heard: list[Firing] = []
    assert cache.control is not None
    cache.control.on_firing = heard.append
    logits_of(model, ids[:, :192], **cache_kwarg(model, cache))
    for layer in cache.ours:
        for _, _, page in layer.store.exact_candidates():
            layer.store.shed_exact(page)
    decode(model, cache, ids, 192)
    assert [f.context for f in heard] == list(range(256, 261))
