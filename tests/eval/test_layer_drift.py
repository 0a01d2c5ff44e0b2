"""Drift by layer: the right rows, in the right layer, on the scale that tiers give."""

import copy
import dataclasses
import math
from itertools import pairwise

import pytest
import torch

from lamina.eval.arms import ARMS
from lamina.eval.layer_drift import layer_drift, record_rows
from lamina.pages import WindowConfig
from tiny_models import build, logits_of, profile_of, tokens

SMALL = WindowConfig(64, 64, 0)


@pytest.fixture(scope="module")
def model():
    return build("Llama")


@pytest.fixture(scope="module")
def rows(model):
    return record_rows(model, tokens(1, 512, 7))


def drift(model, rows, arm="lamina-int2", profile=None, window=SMALL):
    arm = ARMS[arm]
    return layer_drift(model, profile or arm.profile(profile_of("Llama")), arm, rows, window)


def test_recorded_rows_give_the_model_s_own_attention_weights(model, rows):
    eager = build("Llama", attn_implementation="eager")
    with torch.no_grad():
        weights = eager(input_ids=tokens(1, 512, 7), output_attentions=True).attentions
    for seen, expected in zip(rows, weights, strict=True):
        keys = seen.keys.repeat_interleave(2, 0)
        logits = seen.queries @ keys.mT * 32**-0.5
        hidden = torch.arange(512) > torch.arange(448, 512)[:, None]
        got = logits.masked_fill(hidden, float("-inf")).softmax(-1)
        torch.testing.assert_close(got, expected[0, :, -64:], atol=1e-5, rtol=1e-4)


def test_the_number_of_queries(model):
    seen = record_rows(model, tokens(1, 200), queries=10)[0]
    assert seen.queries.shape == (4, 10, 32)
    assert seen.keys.shape == seen.values.shape == (2, 200, 32)


def test_fewer_bits_drift_more_in_every_layer(model, rows):
    by_arm = [drift(model, rows, name) for name in ("naive-int2", "lamina-int2", "lamina-int4", "lamina-int8")]
    assert all(len(one) == 2 for one in by_arm)
    for coarse, fine in pairwise(by_arm):
        assert all(c > 1.2 * f > 0 for c, f in zip(coarse, fine))


def test_only_the_bits_of_keys_count(model, rows):
    assert drift(model, rows, "lamina-k4v2") == drift(model, rows, "lamina-int4")


def test_a_layer_that_reads_wrongly_is_the_one_that_drifts(model, rows):
    profile = profile_of("Llama")
    wrong = dataclasses.replace(profile.layers[1], kappa=100 * profile.layers[1].kappa)
    before = drift(model, rows)
    after = drift(model, rows, profile=dataclasses.replace(profile, layers=[profile.layers[0], wrong]))
    assert after[0] == before[0]
    assert after[1] > 2 * before[1]


def test_what_windows_cover_does_not_drift(model, rows):
    assert drift(model, rows, window=WindowConfig(64, 448, 0)) == [0.0, 0.0]


def test_a_layer_without_rows_has_no_figure(model, rows):
    first, second = drift(model, [rows[0], None])
    assert first > 0
    assert math.isnan(second)


def test_the_model_is_left_as_it_was(model, rows):
    ids = tokens(1, 100)
    fresh = copy.deepcopy(model)
    drift(model, rows)
    assert model.config._attn_implementation == fresh.config._attn_implementation == "sdpa"
    assert torch.equal(logits_of(model, ids), logits_of(fresh, ids))
    with pytest.raises(ValueError, match="shorter"):
        drift(model, rows[:1])
    assert model.config._attn_implementation == "sdpa"
