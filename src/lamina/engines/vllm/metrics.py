"""Lamina's gauges in vLLM's ``/metrics``."""

import time
from typing import Any

from prometheus_client import Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

from lamina.engines.vllm.config import engine_config
from lamina.engines.vllm.metrics_file import read_stats, stats_path

SINGLE = {
    "bits_average": "Bits of K and V of pages that close from now on, averaged over layers",
    "bits_history": "Bits an element of what requests read packed, scales and centers included",
    "arena_slots": "Slots of the arena for planes beyond the base",
    "arena_used": "Slots of the arena in use",
    "exact_pages": "Exact pages that fit, a layer",
    "exact_used": "Exact pages in use, a layer",
    "planes_shed": "Planes dropped for lack of room",
    "hits": "Blocks found by the prefix cache",
    "hits_below_tier": "Blocks found by the prefix cache that had lost planes before",
    "preempted": "Requests that were preempted",
    "non_finite": "Numbers of keys and values that were NaN or Inf",
    "firings": "Decisions of the controller",
    "tier_changes": "Tiers of layers and sides that these changed",
}
BY_LAYER = {
    "layer_bits": ("Bits of pages that close from now on", ("layer", "side")),
    "signal": ("Smoothed drift that so many bits would cause", ("layer", "side", "bits")),
    "bytes": ("Bytes by kind", ("kind",)),
}
_GAUGES: dict[str, Gauge] = {}


def _gauge(name: str, what: str, labels: tuple[str, ...]) -> Gauge:
    """A gauge of this process, made once."""
    if name not in _GAUGES:
        _GAUGES[name] = Gauge(f"lamina_{name}", what, ("engine", *labels), multiprocess_mode="mostrecent")
    return _GAUGES[name]


class LaminaMetrics(StatLoggerBase):
    """Sets the gauges to what the workers have told last, once a second at most."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.engine, self.seen = str(engine_index), 0.0
        on = engine_config(vllm_config.additional_config) is not None
        self.path = stats_path(vllm_config) if on else None

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:  # fmt: skip
        """Take the latest figures in."""
        if self.path is None or time.monotonic() - self.seen < 1:
            return
        self.seen = time.monotonic()
        stats = read_stats(self.path)
        if stats is not None:
            self.show(stats)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def show(self, stats: dict[str, Any]) -> None:
        """Set all gauges."""
        for name, what in SINGLE.items():
            if stats.get(name) is not None:
                _gauge(name, what, ()).labels(self.engine).set(stats[name])
        for kind, n_bytes in stats["bytes"].items():
            self._set("bytes", n_bytes, kind)
        for layer, pair in enumerate(stats["tiers"]):
            for side, bits in zip("kv", pair):
                self._set("layer_bits", bits, str(layer), side)
        for i, ema in enumerate(stats.get("signals", ())):
            for bits, value in ema.items():
                self._set("signal", value, str(i // 2), "kv"[i % 2], bits)

    def _set(self, name: str, value: float, *labels: str) -> None:
        _gauge(name, *BY_LAYER[name]).labels(self.engine, *labels).set(value)
