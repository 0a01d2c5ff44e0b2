"""The transformers engine: a cache whose full-attention layers are pages of codes."""

import inspect
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from lamina.basis.calibrate import check_attention_interface
from lamina.basis.geometry import LayerKind, model_geometry
from lamina.basis.profile import Profile
from lamina.codec import CodecConfig
from lamina.control.config import ControllerConfig
from lamina.control.live import LiveControl
from lamina.control.state import Controller
from lamina.engines import host_layers
from lamina.engines.hf_layer import ATTENTION, HANDLE, LaminaLayer, lamina_attention
from lamina.engines.hf_settings import Tiers, check_canary, layer_scaling, make_controller, parse_tiers
from lamina.engines.padding import Padding
from lamina.errors import CacheStateError, ConfigError, MemoryBudgetError
from lamina.pages import Budget, WindowConfig
from lamina.pages.pager import attach_pager
from lamina.pages.store import CUTS

__all__ = ["ATTENTION", "HANDLE", "LaminaCache", "LaminaLayer", "Snapshot", "Tiers", "lamina_attention"]


class Snapshot:
    """A cache as it was at one time, from :meth:`LaminaCache.snapshot`.

    It shares its pages with the cache until they change, and keeps them until it is released or deleted.
    """

    def __init__(self, cache: "LaminaCache") -> None:
        cache.check_whole()
        self.cache, self.dropped = weakref.ref(cache), cache.dropped
        self.padding, self.seen = cache.padding.columns, cache.seen
        self.stores = [layer.store.snapshot() if layer.store is not None else [] for layer in cache.ours]
        self.hosts = {i: deepcopy(cache.layers[i]) for i in cache.hosts}
        self.released = False

    def __repr__(self) -> str:
        """Tokens, and whether it can be restored."""
        return f"Snapshot({self.seen} tokens{', released' if self.released else ''})"

    def release(self) -> None:
        """Give the pages up that nothing else uses."""
        cache = self.cache()
        if cache is not None and not self.released:
            cache.forget(self.stores)
        self.released = True

    def __del__(self) -> None:
        """Leave the pages to the cache, which may be at work in another thread, to release at its next call."""
        if hasattr(self, "released") and not self.released:
            self.dropped.append(self.stores)


class LaminaCache(Cache):
    """A KV cache of packed pages for a transformers model.

    Pass it as the cache of ``model(...)`` or ``model.generate(...)``. Creating it switches the model's attention to
    ``"lamina"``, which without this cache is the model's own attention. Full-attention layers are packed; sliding
    window and linear attention layers keep transformers' own cache.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder-only model.
    profile : Profile
        Calibrated for this model.
    tiers : int, (int, int) or list, optional
        Bits for K and V: one number, a pair, or a pair a layer; default the profile's.
    window : WindowConfig
        Exact windows.
    codec : CodecConfig
        How closed pages are written.
    max_bytes : int, optional
        Upper bound on the bytes of the packed layers; planes are shed, least predicted loss first, to stay below it,
        and exact rows when no plane is left.
    controller : Controller, ControllerConfig or "tuned", optional
        Decides the tiers of pages that close from now on, starting with ``tiers``, or with what the policy makes of
        the drift in a tuned profile. ``"tuned"`` stands for the settings in the profile. A :class:`Controller` keeps
        its state when it is given to the next cache.

    Examples
    --------
    >>> from lamina import LaminaCache, Profile, WindowConfig
    >>> cache = LaminaCache(model, Profile.load("model.profile"), tiers=(4, 2), window=WindowConfig(recent=128))
    >>> output = model.generate(**inputs, max_new_tokens=5, cache=cache)
    >>> cache.get_seq_length() == output.shape[1] - 1  # the last token has not been read yet
    True
    >>> cache.tiers = 2
    >>> cache.tiers[0]
    (2, 2)

    Go back to an earlier state as often as needed; nothing is copied until it changes:

    >>> read = cache.snapshot()
    >>> again = model.generate(output, max_new_tokens=5, do_sample=False, cache=cache)
    >>> cache.restore(read)
    >>> bool((again == model.generate(output, max_new_tokens=5, do_sample=False, cache=cache)).all())
    True
    """

    layer_class: type[LaminaLayer] = LaminaLayer

    def __init__(
        self,
        model: PreTrainedModel,
        profile: Profile,
        *,
        tiers: Tiers = None,
        window: WindowConfig | None = None,
        codec: CodecConfig | None = None,
        max_bytes: int | None = None,
        controller: Controller | ControllerConfig | str | None = None,
    ) -> None:
        if not isinstance(profile, Profile):
            what = repr(profile) if isinstance(profile, str | Path | None) else f"a {type(profile).__name__}"
            raise ConfigError(f"profile is {what}; call LaminaCache(model, Profile.load(path))")
        geometry = model_geometry(model.config)
        check_attention_interface(model, geometry)
        profile.check_model(geometry)
        if profile.absorbed != bool(getattr(model.config, "lamina_absorbed", False)):
            raise ConfigError(
                "the profile and the model disagree on whether V's basis was folded into the weights; use the profile "
                "that absorb_value_basis returned with the model it changed, and the original one with others"
            )
        if max_bytes is not None and (not isinstance(max_bytes, int) or max_bytes <= 0):
            raise ConfigError(f"max_bytes={max_bytes!r} must be a positive number of bytes")
        self.profile, self.geometry = profile, geometry
        self._tiers = parse_tiers(tiers, profile.tiers)
        self.controller = make_controller(controller, None if tiers is None else self._tiers, geometry, profile)
        self.window = window or WindowConfig()
        self.codec = codec or CodecConfig()
        check_canary(self.controller, self.window)
        self.scaling = layer_scaling(model, [layer.head_dim for layer in geometry.layers])
        self.config = model.config.get_text_config(decoder=True)
        self._create(max_bytes)
        model.set_attn_implementation(ATTENTION)

    def _create(self, max_bytes: int | None) -> None:
        """Empty layers with a budget of their own."""
        self.budget = Budget(max_bytes)
        self.padding = Padding(self.budget)
        self.dropped: deque[list[Any]] = deque()
        self.running = False
        self.layers: list[Any] = []
        layers: list[Any] = host_layers.host_layers(self.config)
        self.ours = [self.layer_class(self, i) for i in self.geometry.packed]
        for layer in self.ours:
            layers[layer.index] = layer
        super().__init__(layers=layers)
        kept = (LayerKind.WINDOW, LayerKind.STATE)
        self.hosts = [i for i, layer in enumerate(self.geometry.layers) if layer.kind in kept]
        # A strong reference would leave the cache's tensors to the cycle collector.
        weak = weakref.proxy(self)
        self.control = LiveControl(self.controller, list(self.geometry.packed)) if self.controller else None
        self.pager = attach_pager(self.budget, lambda: weak.stores)
        self.listeners: list[Callable[[dict[str, Any]], Any]] = []
        self.pager.on_shed = lambda name, start, side, bits, loss: weak.emit(
            "shed", layer=int(name.split()[-1]), start=start, side=side, bits=bits, loss=loss
        )
        if self.control is not None:
            self.control.on_firing = lambda firing: weak.emit("firing", **asdict(firing))
        self.events: list[dict[str, Any]] = []
        self.cut = CUTS[0]
        self.step: Any = None

    @property
    def stores(self) -> list[Any]:
        """Page stores of the packed layers that have seen rows."""
        return [layer.store for layer in self.ours if layer.store is not None]

    @property
    def tiers(self) -> tuple[tuple[int, int], ...]:
        """Bits of K and V for pages that close from now on, one pair a layer; assign to change them at any time."""
        if self.controller is None:
            return tuple(self._tiers)
        decided = iter(self.controller.tiers)
        return tuple(next(decided) if i in self.geometry.packed else pair for i, pair in enumerate(self._tiers))

    @tiers.setter
    def tiers(self, tiers: Tiers) -> None:
        parsed = parse_tiers(tiers, self.profile.tiers)
        if self.controller is not None:
            if not self.controller.frozen:
                raise ConfigError("the controller decides the tiers of this cache; freeze it first")
            self.controller.tiers = [parsed[i] for i in self.geometry.packed]
        self._tiers = parsed

    @property
    def average_tier(self) -> float:
        """Bits that closed pages were written with, averaged over K and V of all of them; NaN without any."""
        tiers = weights = 0
        for store in self.stores:
            bits, pages = store.tier_sum()
            size = store.layout.n_heads * store.layout.head_dim
            tiers, weights = tiers + bits * size, weights + 2 * pages * size
        return tiers / weights if weights else float("nan")

    @property
    def seen(self) -> int:
        """Tokens seen, padding included; between calls, all layers agree."""
        return self.ours[0].seen

    @property
    def lengths(self) -> list[int]:
        """Tokens stored of every sequence, padding left out."""
        first = self.ours[0]
        return [s.length for s in first.store.sequences] if first.store is not None else []

    def crop(self, tokens: int) -> None:
        """Keep the first ``tokens`` tokens; a negative number removes that many from the end, 0 changes nothing.

        Padding counts, as it does in the attention mask.
        """
        if isinstance(tokens, Tensor) and tokens.numel() == 1:
            tokens = tokens.item()
        if isinstance(tokens, bool) or not isinstance(tokens, int):
            raise CacheStateError(f"cannot crop a cache to {tokens!r} tokens; give a whole number")
        self.collect()
        for layer in self.ours:
            layer.withdraw()
        seen = [layer.seen for layer in self.ours]
        target = tokens if tokens > 0 else seen[0] + tokens
        if not 0 <= target <= min(seen):
            raise CacheStateError(f"cannot crop a cache of {min(seen)} tokens to {target}")
        lengths = self.padding.lengths(self.ours[0].batch_size, target)
        self.budget.ensure(lambda: sum(store.crop_bytes(lengths) for store in self.stores))
        self._crop_hosts(target)
        for layer in self.ours:
            layer.crop(target - layer.seen)
        self.padding.crop(target)

    def _crop_hosts(self, target: int) -> None:
        for i in self.hosts:
            layer = self.layers[i]
            if host_layers.is_recurrent(layer):
                if target < self.seen:
                    raise CacheStateError(
                        f"layer {i} keeps a recurrent state, which cannot forget tokens: take a snapshot before they "
                        "come, and restore it"
                    )
                continue
            length = host_layers.length_of(layer)
            remove = target - (self.ours[0].seen if length is None else length)
            if remove == 0 and length is None:
                continue
            try:
                layer.crop(remove)
            except (RuntimeError, ValueError) as error:
                raise CacheStateError(
                    f"layer {i} is a {self.geometry.layers[i].kind} layer, which cannot forget {-remove} tokens: "
                    f"{error}; call cache.activate_past_recording() before the tokens come, or restore a snapshot"
                ) from error

    def reset(self) -> None:
        """Forget everything; snapshots stay."""
        self.collect()
        self.running = False
        fresh = host_layers.host_layers(self.config) if self.hosts else []
        for i in self.hosts:
            self.layers[i] = fresh[i]
        for layer in self.ours:
            layer.reset()
        self.padding.columns = None

    def select(self, rows: Iterable[int] | Tensor) -> None:
        """Make the batch of the sequences ``rows``, in this order: drop, repeat or reorder; pages are shared."""
        self.collect()
        if isinstance(rows, Tensor):
            rows = rows.nonzero()[:, 0].tolist() if rows.dtype == torch.bool else rows.tolist()
        try:
            chosen = [operator.index(i) for i in rows]
        except TypeError as error:
            raise CacheStateError(f"cannot select sequences by {error}; give their numbers") from error
        batch = self.ours[0].batch_size
        if not chosen or any(not 0 <= i < batch for i in chosen):
            raise CacheStateError(f"cannot select sequences {chosen} of a cache of {batch}")
        padded = 0 if self.padding.columns is None else self.padding.columns[chosen].numel() - self.padding.n_bytes
        self.budget.ensure(lambda: padded + sum(s.replace_bytes([s.sequences[i] for i in chosen]) for s in self.stores))
        index = torch.tensor(chosen)
        for i in [*self.geometry.packed, *self.hosts]:
            self.layers[i].reorder_cache(index)
        self.padding.select(chosen)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the batch of the sequences ``beam_idx``, as beam search does."""
        self.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences ``indices``."""
        self.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times, next to each other."""
        self.select(i for i in range(self.ours[0].batch_size) for _ in range(repeats))

    def add(self, other: "LaminaCache") -> None:
        """Add copies of another cache's sequences to the batch.

        Sequences shorter than the longest count as padded on the left: later attention masks have 0 there.
        """
        self._check_other(other)
        mine, theirs = self.seen, other.seen
        seen, batch = max(mine, theirs), self.ours[0].batch_size
        columns = [
            torch.nn.functional.pad(c.padding.columns, (seen - n, 0))
            if c.padding.columns is not None
            else (torch.arange(seen) >= seen - n).expand(b, -1)
            for c, n, b in ((self, mine, batch), (other, theirs, other.ours[0].batch_size))
        ]
        for layer, source in zip(self.ours, other.ours):
            if layer.store is None:
                layer.make_store(source.store.dtype, source.store.device)
        padded = 0 if all(bool(c.all()) for c in columns) else sum(c.numel() for c in columns)
        self.budget.ensure(lambda: padded + sum(x.store.extend_bytes(y.store) for x, y in zip(self.ours, other.ours)))
        for i in self.hosts:
            if batch:
                host_layers.join(self.layers[i], other.layers[i], i)
            else:
                self.layers[i] = deepcopy(other.layers[i])
        for layer, source in zip(self.ours, other.ours):
            layer.store.extend(source.store)
            layer.seen = seen
        self.padding.keep(torch.cat(columns))

    def _check_other(self, other: "LaminaCache") -> None:
        if other is self or type(other) is not type(self) or other.ours[0].store is None:
            raise CacheStateError("only the sequences of another LaminaCache that holds some can be added")
        self.check_whole()
        other.check_whole()
        for what, x, y in (
            ("profile", self.profile.digest(), other.profile.digest()),
            ("windows", self.window, other.window),
            ("codec", self.codec, other.codec),
        ):
            if x != y:
                raise CacheStateError(f"the caches have different {what}: {x} and {y}; make both alike")
        store = self.ours[0].store
        if store is not None and store.dtype != other.ours[0].store.dtype:
            raise CacheStateError(f"the caches hold {store.dtype} and {other.ours[0].store.dtype} rows")

    def snapshot(self) -> Snapshot:
        """Remember the cache as it is; costs no bytes in packed layers until it changes."""
        return Snapshot(self)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this cache, which stays usable."""
        if not isinstance(snapshot, Snapshot) or snapshot.cache() is not self or snapshot.released:
            raise CacheStateError("this snapshot was released, or is of another cache; take one with cache.snapshot()")
        self.collect()
        stored = [(layer.store, taken) for layer, taken in zip(self.ours, snapshot.stores) if layer.store is not None]
        padded = 0 if snapshot.padding is None else snapshot.padding.numel() - self.padding.n_bytes
        self.budget.ensure(lambda: padded + sum(store.replace_bytes(taken) for store, taken in stored))
        self.running = False
        for layer, taken in zip(self.ours, snapshot.stores):
            layer.pending = 0
            layer.seen = snapshot.seen
            if layer.store is not None:
                layer.store.restore(taken)
        for i, host in snapshot.hosts.items():
            self.layers[i] = deepcopy(host)
        self.padding.columns = snapshot.padding

    def __repr__(self) -> str:
        """Rows, layers and bytes."""
        lengths = self.lengths
        rows = f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens" if lengths else "empty"
        n_bytes = sum(self.memory().values())
        return f"{type(self).__name__}({rows}, {len(self.ours)} of {len(self.layers)} layers packed, {n_bytes:,} bytes)"

    def __deepcopy__(self, memo: dict[int, Any]) -> "LaminaCache":
        """A cache of its own with the same content, settings and budget; snapshots are not copied."""
        self.check_whole()
        copy = object.__new__(type(self))
        for name in ("profile", "geometry", "window", "codec", "scaling", "config"):
            setattr(copy, name, getattr(self, name))
        copy.controller = self.controller.copy() if self.controller is not None else None
        copy._tiers = list(self._tiers)
        copy._create(self.budget.max_bytes)
        if self.ours[0].batch_size:
            copy.add(self)
        return copy

    def save(self, path: str | Path) -> None:
        """Write the cache to a safetensors file; see :meth:`load`."""
        from lamina.engines.cache_file import save_cache

        save_cache(self, Path(path))

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: PreTrainedModel,
        profile: Profile,
        *,
        max_bytes: int | None = None,
        controller: Controller | ControllerConfig | str | None = None,
    ) -> "LaminaCache":
        """Read a cache that :meth:`save` wrote, for the same model and profile.

        A controller is not part of the file: give the one to go on with, see :meth:`Controller.snapshot`.

        Raises
        ------
        CacheStateError
            If the file is damaged, or was written with another model, profile or format.
        """
        from lamina.engines.cache_file import load_cache

        return load_cache(Path(path), model, profile, max_bytes, controller)

    def check_state(self, index: int, tokens: int) -> None:
        """Raise CacheStateError unless layer ``index`` may take ``tokens`` rows now.

        The model's attention must read this cache, and all layers must be at the same token: a call that failed half
        way leaves the first layers ahead.
        """
        ours = self.ours
        if self.config._attn_implementation != ATTENTION or any(layer.pending for layer in ours):
            raise CacheStateError(
                f"layer {index}: the model that called runs with another attention than {ATTENTION!r} (the cache's own "
                f"runs with attention {self.config._attn_implementation!r}), which does not read this cache; use the "
                f"model that the cache was made for, call model.set_attn_implementation({ATTENTION!r}), and start anew"
            )
        if index == ours[0].index:
            self.collect()
            if self.running and any(self.geometry.layers[i].kind == LayerKind.STATE for i in self.hosts):
                raise CacheStateError(
                    "an earlier call failed half way, and linear attention layers have taken its tokens in; restore a "
                    "snapshot, call cache.reset(), or take a new cache"
                )
            self.running = True
        first, here, last = (layer.seen for layer in (ours[0], self.layers[index], ours[-1]))
        lengths = {i: host_layers.length_of(self.layers[i]) for i in self.hosts} if index == ours[0].index else {}
        apart = [n for i, n in lengths.items() if n is not None and n != last + tokens * (i < index)]
        if here != (last if index == ours[0].index else first - tokens) or apart:
            whole = min(first, here, last)
            raise CacheStateError(
                f"layer {index} holds {here} tokens, layer {ours[0].index} {first} and the last one {last}"
                f"{f', others {apart[0]}' if apart else ''}: an earlier call failed half way; {_way_back(whole)}, or "
                "take a new cache"
            )

    def make_room(self, real: Tensor | None, batch: int, before: int, tokens: int, dtype: torch.dtype) -> None:
        """Find room for a chunk behind ``before`` columns, giving up as little as goes, the same in all layers.

        What does not fit is stored in none.
        """
        self.cut = CUTS[0]
        if self.budget.max_bytes is None:
            return
        counts = [tokens] * batch if real is None else real.sum(1).tolist()

        def need() -> int:
            grown = self.padding.growth(real, batch, before, tokens)
            return grown + sum(layer.append_bytes(counts, self.cut, dtype) for layer in self.ours)

        for self.cut in CUTS:
            try:
                self.budget.ensure(need, ranks=self.cut.ranks)
            except MemoryBudgetError:
                if self.cut == CUTS[-1]:
                    raise
            else:
                return

    def closed(self, layer: int, starts: list[int], bits: tuple[int, int], missed: list[int]) -> None:
        """Pages of a layer were closed, those that start at ``missed`` without the exact rows they should keep."""
        self.emit("closed", layer=layer, starts=starts, tier=list(bits))
        self.pager.exact_shed += len(missed)
        for start in missed:
            self.emit("shed", layer=layer, start=start, side="exact", bits=list(bits), loss=None)

    def check_positions(self, position_ids: Any, real: Tensor | None) -> None:
        """Raise CacheStateError if a chunk's positions say that the cache has read its tokens already."""
        if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or not self.lengths:
            return
        positions = position_ids.cpu().expand(len(self.lengths), -1)
        kept = torch.ones_like(positions, dtype=torch.bool) if real is None else real
        for b, (length, row) in enumerate(zip(self.lengths, positions)):
            n = int(kept[b].sum())
            last = int(row[kept[b]].max()) if n else length - 1
            if last < length + n - 1:
                raise CacheStateError(
                    f"sequence {b} holds {length} tokens, and this call adds {n} that end at position {last}, not at "
                    f"{length + n - 1}: it reads tokens again that the cache holds, as assisted and prompt-lookup "
                    "decoding do on a cache that is not empty; give the new tokens alone with their position_ids, "
                    "decode without a draft, or start with an empty cache"
                )

    def finished(self, index: int) -> None:
        """Layer ``index`` has attended; with the last one the call is whole."""
        if index == self.ours[-1].index:
            self.running = False
            if self.events:
                memory, bits = self.memory(), self.bits()
                self.emit(
                    "memory", tokens=max(self.lengths), bytes=sum(memory.values()), kinds=memory,
                    bits_history=bits["history"], bits_at_context=bits["context"], planes_shed=self.pager.planes_shed,
                    exact_shed=self.pager.exact_shed,
                )  # fmt: skip

    def emit(self, event: str, **fields: Any) -> None:
        """Tell the listeners what happened, see docs/trace.md; at the end of a call, when the cache is whole again."""
        if self.listeners:
            self.events.append({"event": event, **fields})
        if not self.running:
            events, self.events = self.events, []
            for happened in events:
                for listener in list(self.listeners):
                    listener(happened)

    def check_whole(self) -> None:
        """Raise CacheStateError unless all packed layers hold the same tokens."""
        if len({layer.seen for layer in self.ours}) > 1 or any(layer.pending for layer in self.ours):
            whole = min(layer.seen - layer.pending for layer in self.ours)
            raise CacheStateError(f"an earlier call failed half way; {_way_back(whole)}")

    def collect(self) -> None:
        """Release the pages of snapshots that were dropped."""
        while self.dropped:
            self.forget(self.dropped.popleft())

    def forget(self, taken: list[Any]) -> None:
        """Give up what a snapshot took of every packed layer."""
        for layer, pages in zip(self.ours, taken):
            if layer.store is not None:
                layer.store.forget(pages)

    def memory(self) -> dict[str, int]:
        """Allocated bytes by kind; they add up to the storage of all tensors that hold pages, rows or tables.

        ``host_layers`` are those of transformers' own layers, where the model has some.
        """
        self.collect()
        total = dict.fromkeys(("codes", "scales", "centers", "windows", "page_tables"), 0)
        for store in self.stores:
            for kind, n_bytes in store.memory().items():
                total[kind] += n_bytes
        total["page_tables"] += self.padding.n_bytes
        if self.hosts:
            total["host_layers"] = sum(host_layers.n_bytes(self.layers[i]) for i in self.hosts)
        return total

    def bits(self) -> dict[str, float]:
        """Average bits per element of the packed layers: ``history`` of the packed tokens alone, ``context`` of all."""
        stores = self.stores
        packed, elements = (sum(x) for x in zip(*(s.history_bits() for s in stores))) if stores else (0, 0)
        stored = sum(2 * s.layout.n_heads * s.layout.head_dim * q.length for s in stores for q in s.sequences)
        n_bytes = sum(n for kind, n in self.memory().items() if kind != "host_layers")
        return {
            "history": packed / elements if elements else float("nan"),
            "context": 8 * n_bytes / stored if stored else float("nan"),
        }


def _way_back(whole: int) -> str:
    """What to do about a call that failed after ``whole`` tokens."""
    return f"call {f'cache.crop({whole})' if whole else 'cache.reset()'} to go back to the last whole token"


def cache_kwarg(model: PreTrainedModel, cache: Cache) -> dict[str, Cache]:
    """The cache under the keyword that this transformers version uses for it."""
    names = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}
