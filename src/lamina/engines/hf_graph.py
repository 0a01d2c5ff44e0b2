"""Decode steps of a LaminaCache in a CUDA graph: the host launches once a step, and keeps the books meanwhile."""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lamina.attention.cuda.decode import MOST_QUERIES, NewRows, attend_cuda
from lamina.attention.cuda.encode import encoded_together
from lamina.attention.cuda.gpu import KINDS, MOST_DIM
from lamina.attention.cuda.tables import Patches
from lamina.attention.dispatch import announce_once
from lamina.codec import PAGE_TOKENS, TIERS
from lamina.codec.gaussian import gaussian_rows
from lamina.control.canary import anchored_mean
from lamina.control.config import Canary
from lamina.engines.hf import LaminaCache, cache_kwarg
from lamina.engines.hf_layer import LaminaLayer
from lamina.errors import CacheStateError, ConfigError, NonFiniteError
from lamina.pages.view import StoreView

RESERVE = 1024
"""Tokens of every sequence for which there is storage when a step is captured; it is captured anew behind them."""


TAKEN = "lamina_graph"
HIDDEN = 1 << 30
"""What the device reports where a mask is not what the cache holds; otherwise the number of a layer, counted from 1."""


class DecodeGraph:
    """Runs the decode steps of a model and its cache from CUDA graphs.

    While it is open, calls of the model with one new token for every sequence of the cache are replayed; any other call
    runs as always. Results are those of the same kernels without a graph. Rows that hold NaN or Inf are found out after
    they were stored, at the next step or at the end.

    Parameters
    ----------
    model : PreTrainedModel
        On an NVIDIA GPU, every layer of which the cache keeps in pages.
    cache : LaminaCache
        Of that model.
    reserve : int
        Tokens of every sequence for which storage is taken at a time, without ``max_bytes``.

    Examples
    --------
    >>> from contextlib import nullcontext
    >>> from lamina import DecodeGraph, LaminaCache, Profile
    >>> cache = LaminaCache(model, Profile.load("model.profile"))
    >>> with DecodeGraph(model, cache) if model.device.type == "cuda" else nullcontext():
    ...     output = model.generate(**inputs, max_new_tokens=5, cache=cache)
    >>> output.shape[1] - inputs["input_ids"].shape[1]
    5
    """

    _anywhere = False

    def __init__(self, model: PreTrainedModel, cache: LaminaCache, reserve: int = RESERVE) -> None:
        if not isinstance(cache, LaminaCache):
            raise ConfigError(f"cache is a {type(cache).__name__}; give the LaminaCache that the model runs with")
        if reserve < PAGE_TOKENS:
            raise ConfigError(f"reserve={reserve!r} must be at least {PAGE_TOKENS} tokens")
        self.model, self.cache, self.reserve = model, cache, reserve
        self.device = model.device
        problem = self.problem(model, cache)
        if problem is not None:
            raise ConfigError(problem)
        self.forward: Callable[..., Any] = model.forward
        self._graphs: dict[bool, Any] = {}
        self._outputs: dict[bool, Any] = {}
        self._seen: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._signals: Tensor | None = None
        self._measured = False
        self._undecided: tuple[Tensor, int] | None = None
        self._storage: tuple[int, ...] = ()
        self._versions: list[int] = []
        self._views: dict[int, StoreView] = {}
        self._on_device: list[int] = []

    @classmethod
    def problem(cls, model: PreTrainedModel, cache: LaminaCache) -> str | None:
        """Why a model's steps cannot be captured; None if they can."""
        if model.device.type != "cuda" and not cls._anywhere:
            return f"the model is on {model.device}; CUDA graphs need an NVIDIA GPU"
        if cache.hosts:
            return f"layers {cache.hosts} keep transformers' own cache, whose steps cannot be captured"
        if len({p.device for p in model.parameters()}) > 1:
            return "the model is spread over several devices; a step is captured on one"
        if cache.controller is not None and cache.controller.config.canary == Canary.RING:
            return "the ring canary reads its keys on the host; use the anchored canary, or no graph"
        if model.dtype not in KINDS:
            return f"the model is {model.dtype}; the kernels take {', '.join(map(str, KINDS))}"
        for layer in cache.geometry.packed.values():
            if layer.head_dim > MOST_DIM:
                return f"the head dimension is {layer.head_dim}; the kernels take up to {MOST_DIM}"
        return None

    def __enter__(self) -> "DecodeGraph":
        """Take over the model's decode steps."""
        if hasattr(self.model.forward, TAKEN):
            raise CacheStateError("the model runs from another DecodeGraph already; leave that one first")

        @functools.wraps(self.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(*args, **kwargs)

        setattr(forward, TAKEN, True)
        self._before = vars(self.model).get("forward")
        self.model.forward = forward
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the model back, and take the last decision."""
        if self._before is None:
            del self.model.forward
        else:
            self.model.forward = self._before
        self._release()
        for store in self.cache.stores:
            store.holds_storage = False
        try:
            if error is None:
                self.flush()
        finally:
            self._versions, self._on_device = [], []

    def flush(self) -> None:
        """Wait for the device, take the decision that the last measured step is for, and raise what went wrong."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._take_in()

    def _take_in(self) -> None:
        """Take the decision that the last measured step is for, and raise what the device has reported."""
        if self._undecided is not None:
            (found, context), self._undecided = self._undecided, None
            if self.cache.control is not None:
                self.cache.control.decide(found.cpu(), context)
        mark = int(self._reported) if self._on_device else 0
        if mark:
            self._wrong.zero_()
            self._reported.zero_()
            if mark == HIDDEN:
                raise CacheStateError(
                    "the attention mask of an earlier step hides tokens that are not padding, or shows padding; new "
                    "tokens were stored as real ones: crop the cache, and decode new padding without a graph"
                )
            raise NonFiniteError(
                f"layer {mark - 1}: a key or value row among the last of the cache's {self.cache.seen} tokens holds "
                "NaN or Inf; the model's weights are damaged, or its dtype overflows (try bfloat16); crop the cache "
                "to go on"
            )

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        step = "it has positional arguments" if args else self._step_of(kwargs)
        if not isinstance(step, str):
            return self._step(*step)
        if kwargs.get("input_ids") is not None and kwargs["input_ids"].shape[-1] == 1 and self.cache.lengths:
            announce_once(f"a decode step runs without its CUDA graph: {step}")
        self.flush()
        return self.forward(*args, **kwargs)

    def _step_of(self, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None, Tensor | None] | str:
        """Tokens, positions and mask of a call that is a decode step; otherwise why it is none."""
        cache, batch = self.cache, len(self.cache.lengths)
        given = {name: x for name, x in kwargs.items() if x is not None and x is not False}
        (name,) = cache_kwarg(self.model, cache)
        if given.pop(name, None) is not cache:
            return "it has another cache"
        if (
            kwargs.get("use_cache") is False
            or kwargs.get("return_dict") is False
            or given.pop("logits_to_keep", 1) not in (0, 1)
        ):
            return "it turns use_cache or return_dict off, or asks for other logits than the last"
        tokens, positions, mask = (given.pop(x, None) for x in ("input_ids", "position_ids", "attention_mask"))
        other = sorted(given.keys() - {"use_cache", "return_dict", "cache_position"})
        if other:
            return f"it has {', '.join(other)}"
        if tokens is None or tuple(tokens.shape) != (batch, 1):
            return f"it is no call with one token for each of {batch} sequences"
        if mask is not None and tuple(mask.shape) != (batch, cache.seen + 1):
            return "its attention mask is not one of all tokens so far and the new one"
        if mask is None and cache.padding.columns is not None:
            return "it has no attention mask, though the cache holds padded rows"
        for name in ("output_hidden_states", "output_attentions"):
            if getattr(self.model.config, name, False):
                return f"the model's configuration sets {name}"
        if cache.window.recent == 0 and any(store.closes_unseen for store in cache.stores):
            return "a page that starts off the grid fills up, and without recent exact tokens is read packed at once"
        cache.check_whole()
        return tokens, positions, mask

    def _step(self, tokens: Tensor, positions: Tensor | None, mask: Tensor | None) -> Any:
        cache, batch = self.cache, len(self.cache.lengths)
        cache.collect()
        self._take_in()
        control = cache.control
        measured = control is not None and control.looks(cache.ours[0].index, 1)
        self._prepare(batch)
        self._tokens.copy_(tokens)
        if positions is None:
            self._positions.fill_(cache.seen)
        else:
            self._positions.copy_(positions.expand(batch, 1))
        if self._on_device != cache.lengths:
            self._on_device = list(cache.lengths)
            self._lengths.copy_(torch.tensor(self._on_device, dtype=torch.int32))
        if mask is not None:
            self._check_mask(mask)
        try:
            output = self._replay(measured)
        except BaseException:
            # The device may have counted the token; it is told all anew.
            self._on_device = []
            raise
        self._on_device = [n + 1 for n in self._on_device]
        self._count(batch)
        if measured and self._signals is not None:
            self._undecided = self._signals, max(cache.lengths)
        result = copy.copy(output)
        result["logits"] = output["logits"].clone()
        return result

    def _check_mask(self, mask: Tensor) -> None:
        """Have the device report a mask ``[B, T]`` that hides more than padding, or less."""
        known = self.cache.padding.columns
        real = mask.to(self.device, torch.bool)
        wrong = ~real[:, -1].all() | (~real.all() if known is None else (real[:, :-1] != known.to(self.device)).any())
        torch.maximum(self._wrong, wrong[None] * HIDDEN, out=self._wrong)

    def _prepare(self, batch: int) -> None:
        """Make the books fit one more row of every sequence, and tell the device what is new."""
        cache, stores = self.cache, self.cache.stores
        first = len(self._on_device) != batch
        if first:
            if self._on_device:
                self.flush()
            self._release()
            with torch.inference_mode(False):
                self._tokens, self._positions = torch.zeros(2, batch, 1, dtype=torch.int64, device=self.device)
                self._lengths = torch.zeros(batch, dtype=torch.int32, device=self.device)
                self._wrong = torch.zeros(1, dtype=torch.int32, device=self.device)
                self._reported = torch.zeros(1, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        versions = [store.version for store in stores]
        if not first and versions == self._versions and not any(s.at_edge or s.arena.changed for s in stores):
            return
        cache.make_room(None, batch, cache.seen, 1, stores[0].dtype)
        for store in stores:
            store.holds_storage = cache.budget.max_bytes is None
            store.begin_step(cache.cut)
        self._versions = [store.version for store in stores]
        if self._look() != self._storage:
            self._release()
            if cache.budget.max_bytes is None:
                for store in stores:
                    store.reserve(self.reserve, store.tiers())
            self._storage = self._look()

    def _look(self) -> tuple[int, ...]:
        """Tell the device of all changes; returns where the storage lies."""
        patches = Patches(self.device)
        spare = self.reserve // PAGE_TOKENS if self.cache.budget.max_bytes is None else 0
        found: list[int] = []
        for layer in self.cache.ours:
            view = layer.store.view(self._lengths, patches, spare)
            self._views[layer.index] = view
            parts = (view.records, view.slabs, view.exact, view.table, view.page_ids)
            found += [t.data_ptr() for t in parts]
        patches.flush()
        return tuple(found)

    def _replay(self, measured: bool) -> Any:
        if measured not in self._graphs:
            self._graphs[measured], self._outputs[measured] = self._capture(measured)
        graph = self._graphs[measured]
        graph.replay()
        return self._outputs[measured]

    def _capture(self, measured: bool) -> tuple[Any, Any]:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._run(measured)
            self._lengths -= 1
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            output = self._run(measured)
        return graph, output

    @torch.no_grad()
    def _run(self, measured: bool) -> Any:
        """One step of the model: its attention, by way of :meth:`attend`, is what a graph can hold."""
        self._lengths += 1
        self._measured, self.cache.step = measured, self
        if measured:
            self._seen = {}
        try:
            output = self.forward(
                input_ids=self._tokens, position_ids=self._positions, use_cache=True, return_dict=True,
                **cache_kwarg(self.model, self.cache),
            )  # fmt: skip
        finally:
            self.cache.step = None
        if measured:
            self._signals = self._measure()
        self._reported.copy_(self._wrong, non_blocking=True)
        return output

    def _measure(self) -> Tensor:
        """Signals of all layers, float32 ``[layers, 2, 3]``, those of alike layers in one go."""
        places = {layer.index: n for n, layer in enumerate(self.cache.ours) if layer.index in self._seen}
        signals = torch.full((len(self.cache.ours), 2, len(TIERS)), float("nan"), device=self.device)
        for shape in {seen[0].shape for seen in self._seen.values()}:
            alike = [i for i in places if self._seen[i][0].shape == shape]
            query, out, spread, lse = (torch.stack(x) for x in zip(*(self._seen[i] for i in alike)))
            found = anchored_mean(query, out, spread, lse, gaussian_rows(self.cache.codec, shape[-1]))
            for i, signal in zip(alike, found):
                signals[places[i]] = signal
        return signals

    def attend(self, layer: LaminaLayer, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        """Append rows and attend, on the device alone: ``[B, 1, Hq, D]``."""
        if query.shape[1] // key.shape[1] > MOST_QUERIES:
            raise ConfigError(
                f"layer {layer.index}: {query.shape[1]} query heads on {key.shape[1]} KV heads; the kernels take up to "
                f"{MOST_QUERIES} a KV head; decode without a graph"
            )
        rows = gaussian_rows(self.cache.codec, key.shape[-1]) if self._measured else None
        basis = replace(layer.basis, softcap=kwargs.get("softcap") or 0.0, sinks=kwargs.get("s_aux"), rows=rows)
        new = NewRows(key, value, self._wrong, layer.index + 1)
        result = attend_cuda(query, self._views[layer.index], basis, new=new).with_sinks(basis.sinks)
        if result.spread is not None:
            newest = query[:, :, -1], result.out[:, -1], result.spread[:, :, -1], result.lse_packed[:, :, -1]
            # Layers that share another's pages are not asked.
            self._seen.setdefault(layer.index, newest)
        return result.out

    def _count(self, batch: int) -> None:
        """Keep the books of a step that the device has been given."""
        cache = self.cache
        before = cache.seen
        cache.running = True
        with encoded_together([store.writer for store in cache.stores]):
            for layer in cache.ours:
                layer.seen += 1
                layer.store.end_step()
        cache.padding.grow(None, batch, before, 1)
        cache.finished(cache.ours[-1].index)

    def _release(self) -> None:
        """Forget the graphs, and the storage that they know."""
        self._graphs, self._outputs, self._storage, self._views = {}, {}, (), {}
