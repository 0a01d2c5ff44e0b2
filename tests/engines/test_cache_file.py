"""Saved caches: the same cache again, and an error of its own for every way a file can be wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from helpers import check_slots, page_contents, storage_bytes
from lamina.engines.hf import LaminaCache, cache_kwarg
from lamina.errors import CacheStateError, MemoryBudgetError, ProfileError
from lamina.pages import WindowConfig
from tiny_models import build, logits_of, profile_of, tokens

Tensors = dict[str, Tensor]


def filled(padded: bool = False, **kwargs: Any) -> tuple[Any, LaminaCache]:
    """A model and a cache with two sequences of up to 400 tokens, one snapshot and a row that left."""
    model = build("Llama")
    cache = LaminaCache(model, profile_of("Llama"), tiers=(4, 2), window=WindowConfig(recent=64), **kwargs)
    ids, mask = tokens(3, 400), torch.ones(3, 400, dtype=torch.long)
    if padded:
        mask[0, :150] = 0
    logits_of(model, ids[:, :390], attention_mask=mask[:, :390], **cache_kwarg(model, cache))
    cache.select([0, 2])
    for t in range(390, 400):
        logits_of(model, ids[[0, 2], t : t + 1], attention_mask=mask[[0, 2], : t + 1], **cache_kwarg(model, cache))
    return model, cache


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_round_trip(padded: bool, tmp_path: Path) -> None:
    model, cache = filled(padded)
    cache.save(tmp_path / "a" / "cache.safetensors")
    again = LaminaCache.load(tmp_path / "a" / "cache.safetensors", model, profile_of("Llama"))
    assert again.lengths == cache.lengths == ([250, 400] if padded else [400, 400])
    assert (again.tiers, again.window, again.codec) == (cache.tiers, cache.window, cache.codec)
    for mine, theirs in zip(again.ours, cache.ours):
        assert [page_contents(mine.store, b) for b in range(2)] == [page_contents(theirs.store, b) for b in range(2)]
        check_slots(mine.store)
    assert sum(again.memory().values()) == sum(storage_bytes(x.store) for x in again.ours) + 2 * 400 * padded
    mask = torch.ones(2, 500, dtype=torch.long)
    mask[0, :150] = int(not padded)
    for n in (100,):
        chunk = {"input_ids": tokens(2, n, seed=7), "attention_mask": mask[:, : 400 + n]}
        a, b = (model(**chunk, **cache_kwarg(model, c)).logits for c in (cache, again))
        assert torch.equal(a, b)
    assert not list(tmp_path.glob("a/*.partial"))


def test_the_file_holds_no_more_than_the_sequences(tmp_path: Path) -> None:
    model, cache = filled()
    keep = cache.snapshot()
    cache.crop(100)
    cache.save(tmp_path / "c.safetensors")
    alone = LaminaCache(model, profile_of("Llama"), tiers=(4, 2), window=WindowConfig(recent=64))
    logits_of(model, tokens(3, 400)[[0, 2], :100], **cache_kwarg(model, alone))
    assert (tmp_path / "c.safetensors").stat().st_size < 1.2 * sum(alone.memory().values()) + 20_000
    keep.release()


def change_meta(**values: Any) -> Callable[[dict, Tensors], None]:
    return lambda meta, tensors: meta.update(values)


def change(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[dict, Tensors], None]:
    def apply(meta: dict, tensors: Tensors) -> None:
        tensors[name] = value(tensors[name]).contiguous()

    return apply


def put(at: tuple[Any, ...], x: int) -> Callable[[Tensor], Tensor]:
    def apply(t: Tensor) -> Tensor:
        t = t.clone()
        t[at] = x
        return t

    return apply


DAMAGE: dict[str, tuple[Callable[[dict, Tensors], Any], str]] = {
    "format": (change_meta(format="other"), "no saved cache"),
    "version": (change_meta(format_version=9), "cache format 9"),
    "field": (lambda meta, _: meta.pop("seen"), "field seen is None"),
    "profile": (change_meta(profile="0" * 16), "written with another profile"),
    "dtype": (change_meta(dtype="bfloat16"), "exact has torch.float32 rows"),
    "no dtype": (change_meta(dtype="nothing"), "damaged"),
    "window": (change_meta(window={"sink": 3}), "sink=3"),
    "lengths": (change_meta(lengths=[400, 399]), "does not describe whole sequences"),
    "one sequence": (change_meta(lengths=[400]), "does not describe whole sequences"),
    "tensor": (lambda _, t: t.pop("layers.1.records"), "layer 1: records is missing"),
    "shape": (change("layers.0.slabs", lambda t: t[..., :4]), "slabs has torch.uint8 rows of shape"),
    "page id": (change("layers.0.pages", put((0, 0), 99)), "does not describe whole sequences"),
    "negative page": (change("layers.0.pages", put((0, 0), -7)), "does not describe whole sequences"),
    "slot": (change("layers.0.table", put((1, 4), 99)), "does not describe whole sequences"),
    "slot used twice": (change("layers.0.table", lambda t: put((1, 4), int(t[2, 4]))(t)), "does not describe"),
    "tier": (change("layers.0.table", put((1, 2), 3)), "does not describe whole sequences"),
    "rows": (change("layers.0.table", put((1, 1), 65)), "does not describe whole sequences"),
    "start": (change("layers.0.table", put((1, 0), 1)), "does not describe whole sequences"),
    "fewer exact rows": (change("layers.0.exact", lambda t: t[:-1]), "does not describe whole sequences"),
    "padding": (change("padding", lambda t: t[:, :-1]), "padding has shape"),
    "other padding": (change("padding", put((0, 0), 1)), "padding does not fit lengths"),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "cache.safetensors"
    filled(padded=True)[1].save(path)
    return path


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named(damage: Callable[[dict, Tensors], None], message: str, saved: Path, tmp_path: Path) -> None:
    with safe_open(saved, framework="pt") as f:
        meta = json.loads(f.metadata()["lamina"])
        meta.pop("crc32")
        tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    damage(meta, tensors)
    path = tmp_path / "damaged.safetensors"
    save_file(tensors, path, metadata={"lamina": json.dumps(meta)})
    with pytest.raises((CacheStateError, ValueError), match=message):
        LaminaCache.load(path, build("Llama"), profile_of("Llama"))


def test_what_else_cannot_be_loaded(saved: Path, tmp_path: Path) -> None:
    model = build("Llama")
    with pytest.raises(CacheStateError, match="there is no saved cache at"):
        LaminaCache.load(tmp_path / "none", model, profile_of("Llama"))
    short = tmp_path / "short.safetensors"
    short.write_bytes(saved.read_bytes()[:1000])
    with pytest.raises(CacheStateError, match="cannot be read as a saved cache"):
        LaminaCache.load(short, model, profile_of("Llama"))
    with pytest.raises(CacheStateError, match="another profile"):
        LaminaCache.load(saved, model, profile_of("Llama").with_transform("hadamard"))
    with pytest.raises(ProfileError, match="does not fit this model"):
        LaminaCache.load(saved, build("Qwen2"), profile_of("Llama"))
    with pytest.raises(MemoryBudgetError):
        LaminaCache.load(saved, model, profile_of("Llama"), max_bytes=10_000)
    with pytest.raises(CacheStateError, match="empty; there is nothing to save"):
        LaminaCache(model, profile_of("Llama")).save(tmp_path / "x")
