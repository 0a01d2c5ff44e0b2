import time

from transformers import DynamicCache

from lamina.app.loading import LoadedModel
from lamina.app.speed import UNTIMED_STEPS, decode_speeds
from lamina.basis.geometry import model_geometry
from tiny_llama import make_model, make_tokenizer


def test_every_cache_is_stepped_in_turn_and_the_median_counts(monkeypatch):
    model = make_model()
    loaded = LoadedModel("tiny", model, make_tokenizer(), model_geometry(model.config))
    caches = {"a": DynamicCache(config=model.config), "b": DynamicCache(config=model.config)}
    order = []
    for name, cache in caches.items():
        update = cache.update
        monkeypatch.setattr(cache, "update", lambda *a, u=update, n=name, **k: order.append(n) or u(*a, **k))
    ids = loaded.tokenizer("a short prompt", return_tensors="pt")["input_ids"]
    clock = iter(range(10**6))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) * 0.5)
    counts = []
    speeds = decode_speeds(loaded, ids, caches, 3, counts.append)
    assert speeds == {"a": 2.0, "b": 2.0}
    steps = 1 + UNTIMED_STEPS + 3
    assert order == ["a", "a", "b", "b"] * steps  # two layers each
    assert counts == list(range(1, 2 * steps + 1))
    assert all(c.get_seq_length() == ids.shape[1] + steps - 1 for c in caches.values())
