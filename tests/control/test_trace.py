"""Traces of real runs: every event is there, in order, and adds up with the cache."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lamina.codec import TIERS
from lamina.control.config import ControllerConfig
from lamina.control.trace import Trace
from lamina.engines.hf import LaminaCache, cache_kwarg
from lamina.errors import ConfigError
from lamina.pages import WindowConfig
from tiny_models import build, logits_of, profile_of, tokens

WINDOW = WindowConfig(recent=64)


def traced(path: Path, **kwargs: Any) -> tuple[LaminaCache, list[dict[str, Any]]]:
    model, ids = build("Llama"), tokens(1, 520)
    cache = LaminaCache(model, profile_of("Llama"), window=WINDOW, **kwargs)
    with Trace(path, cache):
        for part in ids[:, :400].split(50, 1):
            logits_of(model, part, **cache_kwarg(model, cache))
        for t in range(400, 520):
            logits_of(model, ids[:, t : t + 1], **cache_kwarg(model, cache))
    logits_of(model, ids[:, :1], **cache_kwarg(model, cache))
    return cache, [json.loads(line) for line in path.read_text().splitlines()]


def test_a_trace_says_what_the_cache_did(tmp_path: Path) -> None:
    config = ControllerConfig(rate=1 / 16, policy="threshold", tau0=1e-9)  # type: ignore[arg-type]
    cache, events = traced(tmp_path / "t.jsonl", controller=config, tiers=(4, 2))
    kinds = [e["event"] for e in events]
    assert kinds[0] == "start" and kinds[-1] == "end" and set(kinds) == {"start", "firing", "closed", "memory", "end"}
    start = events[0]
    assert (start["format"], start["version"], start["tiers"]) == ("lamina-trace", 1, [[4, 2]] * 2)
    assert start["layers"] == [0, 1] and start["window"]["recent"] == 64 and start["controller"]["tau0"] == 1e-9
    firings = [e for e in events if e["event"] == "firing"]
    assert [f["step"] for f in firings] == list(range(16, 121, 16)) and firings[0]["tiers"] == [[8, 8]] * 2
    assert all(len(row) == len(TIERS) for f in firings for row in f["signals"] + f["ema"])
    closed = [e for e in events if e["event"] == "closed"]
    for layer in (0, 1):
        pages = [(s, tuple(e["tier"])) for e in closed if e["layer"] == layer for s in e["starts"]]
        assert pages == [(s, (4, 2) if s < 384 else (8, 8)) for s in range(0, 512, 64)]
    memory = [e for e in events if e["event"] == "memory"]
    assert memory[-1]["bytes"] == sum(memory[-1]["kinds"].values()) and memory[-1]["tokens"] <= 520
    assert all(a["seconds"] <= b["seconds"] for a, b in pairwise(events))
    assert len(cache.listeners) == 0, "a closed trace hears nothing more"


def test_planes_that_are_shed_are_in_it(tmp_path: Path) -> None:
    needed = [sum(traced(tmp_path / "whole.jsonl", tiers=bits)[0].memory().values()) for bits in (2, 8)]
    limit = int(0.2 * needed[0] + 0.8 * needed[1])
    cache, events = traced(tmp_path / "t.jsonl", tiers=8, max_bytes=limit)
    shed = [e for e in events if e["event"] == "shed"]
    assert len(shed) == cache.pager.planes_shed > 0
    assert {e["bits"] for e in shed} <= {2, 4} and {e["side"] for e in shed} <= {"k", "v"}
    assert all(e["start"] % 64 == 0 and math.isfinite(e["loss"]) for e in shed)
    last: dict[tuple[int, int, str], int] = {}
    for e in shed:
        key = (e["layer"], e["start"], e["side"])
        assert e["bits"] < last.get(key, 8), "a plane goes once"
        last[key] = e["bits"]
    assert max(e["bytes"] for e in events if e["event"] == "memory") <= limit


def test_an_unwritable_trace_is_refused_before_anything_runs(tmp_path: Path) -> None:
    cache = LaminaCache(build("Llama"), profile_of("Llama"))
    with pytest.raises(ConfigError, match="cannot write the trace"):
        Trace(tmp_path / "no" / "where.jsonl", cache)
    assert not cache.listeners
