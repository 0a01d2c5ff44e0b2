"""Weights and settings that tuning finds, against what runs with fixed tiers show."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from lamina.basis.profile import Profile
from lamina.basis.tuning import Tuning
from lamina.control.config import ControllerConfig, Policy
from lamina.control.tuning import settings_of
from lamina.engines.hf import LaminaCache
from lamina.errors import ConfigError, DataError, ProfileError
from lamina.eval.arms import ARMS
from lamina.eval.fidelity import measure_fidelity
from lamina.eval.tuning import FixedArm, measure_weights, tune_to_bits, tune_to_kl
from lamina.pages import WindowConfig
from tiny_models import build, profile_of, tokens

WINDOW = WindowConfig(64, 64, 64)
TEXT = [tokens(1, 512, seed=50)]


@cache
def weighted() -> Profile:
    weights, drift = measure_weights(build("Llama"), profile_of("Llama"), TEXT, window=WINDOW)
    return replace(profile_of("Llama"), tuning=Tuning(weights, drift))


def kl_of(vector: list[tuple[int, int]]) -> float:
    arm = FixedArm("fixed", "", (2, 2), vector=tuple(vector))
    (result,) = measure_fidelity(build("Llama"), profile_of("Llama"), [arm], TEXT, window=WINDOW)
    assert result.tier_mean == pytest.approx(sum(map(sum, vector)) / 4)
    return result.kl_mean


def test_drift_at_two_bits_is_what_that_side_alone_costs() -> None:
    tuning = weighted().tuning
    assert tuning is not None and len(tuning.weights) == 2 and len(tuning.drift) == 4
    rest = kl_of([(8, 8)] * 2)
    for i, vector in enumerate(([(2, 8), (8, 8)], [(8, 2), (8, 8)], [(8, 8), (2, 8)], [(8, 8), (8, 2)])):
        assert tuning.drift[i][0] == pytest.approx(kl_of(vector) - rest, rel=1e-3)
        assert tuning.drift[i][0] > tuning.drift[i][1] > tuning.drift[i][2] > 0
    together = sum(row[0] for row in tuning.drift)
    assert 0.5 < together / kl_of([(2, 2)] * 2) < 2, "the costs add up"


def test_bits_go_where_they_lower_the_output_s_drift() -> None:
    tuned = tune_to_bits(weighted(), 3.0)
    assert tuned.tuning is not None and settings_of(tuned.tuning).policy == Policy.ALLOCATE
    assert sum(map(sum, tuned.tiers)) / 4 <= 3.0
    assert kl_of(tuned.tiers) < min(kl_of([(4, 2)] * 2), kl_of([(2, 4)] * 2))
    live = measure_fidelity(build("Llama"), tuned, [ARMS["lamina-live"], ARMS["lamina-live-3"]], TEXT, window=WINDOW)
    assert live[0].kl_mean == live[1].kl_mean < kl_of([(4, 2)] * 2) and live[0].tier_mean <= 3.0


def test_the_threshold_keeps_a_budget_on_every_text() -> None:
    texts = [TEXT, [tokens(1, 512, seed=51)]]
    budget = kl_of([(4, 4)] * 2) * 2
    said: list[str] = []
    tuned, results = tune_to_kl(
        build("Llama"), weighted(), texts, budget, window=WINDOW, progress=lambda what, done, total: said.append(what)
    )
    assert len(results) == 2 and all(r.kl_mean <= budget for r in results)
    assert any(r.tier_mean < 8 for r in results) and said[0].startswith("Run 1 at threshold")
    assert tuned.tuning is not None and settings_of(tuned.tuning).policy == Policy.THRESHOLD
    _, (result,) = tune_to_kl(build("Llama"), weighted(), [TEXT], kl_of([(8, 8)] * 2) * 1.5, window=WINDOW)
    assert result.tier_mean > 7, "however little there is below it, 8 bits are found"
    with pytest.raises(ConfigError, match=r"no threshold keeps the mean KL within 1e-12"):
        tune_to_kl(build("Llama"), weighted(), [TEXT], 1e-12, window=WINDOW)


def test_what_cannot_be_tuned_is_refused() -> None:
    model, profile = build("Llama"), profile_of("Llama")
    with pytest.raises(DataError, match="nothing left the exact windows"):
        measure_weights(model, profile, [tokens(1, 128)], window=WINDOW)
    with pytest.raises(ConfigError, match="has no weights"):
        tune_to_bits(profile, 3.0)
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="max_kl"):
            tune_to_kl(model, weighted(), [TEXT], wrong)
    with pytest.raises(ConfigError, match="has no threshold"):
        tune_to_kl(model, weighted(), [TEXT], 0.1, policy=Policy.ALLOCATE)
    with pytest.raises(ConfigError, match="needs a tuned profile"):
        ARMS["lamina-live"].cache(model, profile, WINDOW)


def test_a_tuned_profile_is_saved_and_damage_is_noticed(tmp_path: Path) -> None:
    tuned = tune_to_bits(weighted(), 2.5)
    tuned.save(tmp_path / "p")
    loaded = Profile.load(tmp_path / "p")
    assert loaded.tuning == tuned.tuning and loaded.tiers == tuned.tiers
    cache = LaminaCache(build("Llama"), loaded, controller=settings_of(loaded.tuning))  # type: ignore[arg-type]
    assert cache.controller is not None and cache.controller.weights == tuned.tuning.weights  # type: ignore[union-attr]
    tuned_cache = LaminaCache(build("Llama"), loaded, controller="tuned")
    assert tuned_cache.controller is not None and tuned_cache.controller.config == settings_of(loaded.tuning)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs a profile that `lamina tune` made"):
        LaminaCache(build("Llama"), profile_of("Llama"), controller="tuned")
    assert loaded.with_transform("hadamard").tuning is None, "weights are those of the basis"
    good = tuned.tuning.as_json()  # type: ignore[union-attr]
    for change, words in (
        ({"weights": good["weights"][:1]}, "not 2 rows"),
        ({"drift": [[1.0, -1.0, 0.0]] * 4}, "at least 0"),
        ({"drift": [[1.0, math.nan, 0.0]] * 4}, "at least 0"),
        ({"settings": 3}, "no mapping"),
    ):
        broken = replace(tuned, tuning=_Raw(json.loads(json.dumps(good | change))))  # type: ignore[arg-type]
        broken.save(tmp_path / "broken")
        with pytest.raises(ProfileError, match=words):
            Profile.load(tmp_path / "broken")


def test_settings_that_are_not_known_are_refused() -> None:
    for settings, words in (({"policy": "none"}, "unknown policy"), ({"speed": 1}, "speed")):
        with pytest.raises(ConfigError, match=words):
            settings_of(Tuning([], [], settings))


class _Raw(dict[str, object]):
    def as_json(self) -> dict[str, object]:
        return self


def test_weights_make_signals_comparable() -> None:
    """The same drift in two layers counts for what the weights say."""
    from lamina.control.canary import Signals
    from lamina.control.state import Controller

    signals = {i: Signals({2: 0.1, 4: 0.01, 8: 0.001}, {2: 0.1, 4: 0.01, 8: 0.001}) for i in (0, 1)}
    config = ControllerConfig(policy=Policy.THRESHOLD, tau0=0.05)
    controller = Controller(config, [(8, 8)] * 2, weights=[(1.0, 0.1), (10.0, 1000.0)])
    firing = controller.decide(signals, 100)
    assert firing is not None and firing.tiers == [(4, 2), (8, 8)]
    assert firing.ema[3] == pytest.approx([100.0, 10.0, 1.0])
    assert Controller(config, [(8, 8)] * 2).decide(signals, 100).tiers == [(4, 4)] * 2  # type: ignore[union-attr]
    ring = replace(config, canary="ring")
    assert Controller(ring, [(8, 8)] * 2, weights=[(9.0, 9.0)] * 2).weights == [(1.0, 1.0)] * 2, "EchoKV has none"
    with pytest.raises(ConfigError, match="1 weights do not fit 2 layers"):
        Controller(config, [(8, 8)] * 2, weights=[(1.0, 1.0)])


def test_equal_text_gives_equal_weights() -> None:
    first = weighted().tuning
    weights, _ = measure_weights(build("Llama"), profile_of("Llama"), TEXT, window=WINDOW)
    assert first is not None and torch.equal(torch.tensor(weights), torch.tensor(first.weights))
