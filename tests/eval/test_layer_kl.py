"""KL by layer: of all kinds of arms, with the tiers in force, against the other way to compute it."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from lamina.control.config import ControllerConfig
from lamina.eval.arms import ARMS, Arm
from lamina.eval.fidelity import measure_fidelity
from lamina.eval.layer_drift import layer_drift, record_rows
from lamina.eval.layer_kl import kl_by_layer
from lamina.pages import WindowConfig
from tiny_models import build, profile_of, tokens

WINDOW = WindowConfig(64, 64)
IDS = tokens(1, 512, 7)


def measured(arms: list[Arm], **options: Any) -> dict[str, list[float]]:
    model, profile = build("Llama"), profile_of("Llama")
    opened = {arm.name: arm.open(model, arm.profile(profile), WINDOW) for arm in arms}
    return kl_by_layer(model, arms, opened, IDS, WINDOW, **options)


def test_it_is_the_drift_that_pages_have() -> None:
    model, profile = build("Llama"), profile_of("Llama")
    found = measured([ARMS["lamina-int2"], ARMS["oscar-int2"], ARMS["naive-int4"]])
    for name, kl in found.items():
        arm = ARMS[name]
        expected = layer_drift(model, arm.profile(profile), arm, record_rows(model, IDS), WINDOW)
        assert kl == pytest.approx(expected, rel=1e-3)


def test_simulated_and_exact_arms_have_one_too() -> None:
    found = measured([ARMS[name] for name in ("naive-int2", "kivi-int2", "lamina-int8", "bf16")])
    for coarse, fine in pairwise(found.values()):
        assert all(c > f > 0 for c, f in zip(coarse, fine, strict=True))


def test_a_controllers_tiers_count() -> None:
    config = ControllerConfig(policy="allocate", target_bits=8.0)  # type: ignore[arg-type]
    live = replace(ARMS["lamina-live-3"], controller=config)  # type: ignore[type-var]
    model, profile = build("Llama"), profile_of("Llama")
    new = live.open(model, profile, WINDOW)
    before = kl_by_layer(model, [live], {live.name: new}, IDS, WINDOW)[live.name]
    new().controller.tiers = [(8, 8)] * 2
    after = kl_by_layer(model, [live], {live.name: new}, IDS, WINDOW)[live.name]
    assert after == pytest.approx(measured([ARMS["lamina-int8"]])["lamina-int8"])
    assert all(a < b / 10 for a, b in zip(after, before))


def test_fidelity_tells_it_where_asked_and_not_for_capped_logits(monkeypatch: Any) -> None:
    model, profile, arms = build("Llama"), profile_of("Llama"), [ARMS["lamina-int2"]]
    (plain,) = measure_fidelity(model, profile, arms, [IDS], window=WINDOW)
    (told,) = measure_fidelity(model, profile, arms, [IDS, tokens(1, 512, 8)], window=WINDOW, by_layer=True)
    assert plain.kl_by_layer == [] and told.kl_by_layer == measured(arms)["lamina-int2"]
    monkeypatch.setattr("lamina.eval.stages.TOLERANCE", -1.0)
    assert measured(arms) == {}
    assert all(math.isfinite(x) for x in told.kl_by_layer) and torch.is_grad_enabled()
