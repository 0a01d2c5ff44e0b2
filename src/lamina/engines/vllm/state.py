"""Lamina in one vLLM worker: pages of all layers, the requests they belong to, and what is known of them."""

import math
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lamina.attention.dispatch import page_writer
from lamina.attention.types import ReadBasis
from lamina.basis.encoder import PageEncoder
from lamina.basis.profile import LayerProfile, Profile
from lamina.basis.transforms import LayerTransform
from lamina.codec import PAGE_TOKENS, CodecConfig
from lamina.codec.packing import SLABS_OF_BITS
from lamina.control.live import LiveControl
from lamina.control.state import Controller, Firing
from lamina.engines.vllm.blocks import BlockArena, BlockStore
from lamina.engines.vllm.config import AUTO, EngineConfig
from lamina.engines.vllm.metrics_file import replace_json
from lamina.errors import ConfigError
from lamina.pages.config import WindowConfig
from lamina.pages.layout import RecordLayout
from lamina.pages.pool import Budget, Field, Pool

SHED_SHARE = 1 / 64
"""Share of the arena that is freed at a time once it is full."""


@dataclass(frozen=True)
class LayerShape:
    """One attention layer of this worker: its index in the model, KV heads, the first of them, and head dimension."""

    index: int
    n_heads: int
    first_head: int
    head_dim: int

    @property
    def layout(self) -> RecordLayout:
        """Records that fill whole blocks of vLLM, which count bytes a token and head."""
        return RecordLayout(self.n_heads, self.head_dim, align=self.n_heads * PAGE_TOKENS)


@dataclass
class Layer:
    """What attention of one layer needs."""

    shape: LayerShape
    store: BlockStore
    encoder: PageEncoder
    basis: ReadBasis


@dataclass(frozen=True)
class Sizes:
    """How a worker's bytes for the KV cache are shared out.

    Attributes
    ----------
    blocks : int
        Blocks of vLLM.
    block_bytes : int
        Bytes of a block over all layers.
    slabs : int
        Slots of the arena.
    slab_bytes : int
        Bytes of a slot.
    exact_pages : int
        Exact pages, open ones included.
    exact_bytes : int
        Bytes of an exact page over all layers.
    """

    blocks: int
    block_bytes: int
    slabs: int
    slab_bytes: int
    exact_pages: int
    exact_bytes: int


def sizes(
    available: int, shapes: list[LayerShape], itemsize: int, tiers: list[tuple[int, int]], arena_gb: float | str,
    most_exact: int,
) -> Sizes:  # fmt: skip
    """Share bytes out over base planes, the arena and exact rows.

    Parameters
    ----------
    available : int
        Bytes that there are.
    shapes : list of LayerShape
        The layers.
    itemsize : int
        Bytes of a number of the engine's rows.
    tiers : list of (int, int)
        Bits that pages are written with, one pair a layer.
    arena_gb : float or "auto"
        GB for planes beyond the base; ``auto``: as many as the tiers take in every block.
    most_exact : int
        Exact pages that can be needed at a time.

    Raises
    ------
    ConfigError
        If that leaves no block.
    """
    slab_bytes = max(s.layout.slab_bytes for s in shapes)
    block = sum(s.layout.record_bytes for s in shapes)
    exact = sum(8 * s.layout.slab_bytes * itemsize for s in shapes)
    planes = sum(SLABS_OF_BITS[b] - 1 for pair in tiers for b in pair)
    if arena_gb == AUTO:
        each, arena = block + planes * slab_bytes, 0
    else:
        each, arena = block, int(float(arena_gb) * 1e9)
    # Fewer blocks than exact pages need no more exact pages than blocks.
    blocks = max((available - arena - most_exact * exact) // each, 0)
    if blocks < most_exact:
        blocks = max((available - arena) // (each + exact), 0)
    if blocks < 2:
        raise ConfigError(
            f"{available / 1e9:.3g} GB for the KV cache hold no block beside {arena / 1e9:.3g} GB of arena and exact "
            "rows; give vLLM more memory, or lower arena_gb, max_num_seqs or max_num_batched_tokens"
        )
    slabs = blocks * planes if arena_gb == AUTO else arena // slab_bytes
    return Sizes(blocks, block, slabs, slab_bytes, min(most_exact, blocks), exact)


def exact_pages(window: WindowConfig, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Exact pages that can be needed at a time: windows, open pages, and what a step adds before it lets go."""
    kept = (window.sink + window.recent + window.rollback) // PAGE_TOKENS + 2
    return max_num_seqs * (kept + 1) + max_num_batched_tokens // PAGE_TOKENS + 1


class Requests:
    """Which requests the sequences are, and where their blocks lie.

    Attributes
    ----------
    blocks : list of list of int
        Blocks of each sequence.
    """

    def __init__(self) -> None:
        self.index: dict[str, int] = {}
        self.names: list[str] = []
        self.blocks: list[list[int]] = []

    def add(self, name: str, blocks: list[int]) -> None:
        """Add a request."""
        self.index[name] = len(self.names)
        self.names.append(name)
        self.blocks.append(list(blocks))

    def remove(self, name: str) -> int:
        """Give up a request; the last one takes its place, which is returned."""
        at = self.index.pop(name)
        last = self.names.pop()
        blocks = self.blocks.pop()
        if last != name:
            self.names[at], self.blocks[at], self.index[last] = last, blocks, at
        return at


class WorkerState:
    """Pages of one worker.

    Parameters
    ----------
    config : EngineConfig
        What the user set.
    profile : Profile
        Calibrated for the model.
    shapes : list of LayerShape
        The attention layers, in the order in which they run.
    scaling : list of float
        Factor on q.k, one a layer.
    records : list of Tensor
        uint8 ``[blocks, record_bytes]`` a layer: vLLM's own memory.
    dtype : torch.dtype
        Of the engine's rows.
    shares : Sizes
        How large the pools are.
    controller : Controller, optional
        Decides the tiers.
    """

    def __init__(
        self, config: EngineConfig, profile: Profile, shapes: list[LayerShape], scaling: list[float],
        records: list[Tensor], dtype: torch.dtype, shares: Sizes, tiers: list[tuple[int, int]],
        controller: Controller | None = None,
    ) -> None:  # fmt: skip
        self.config, self.window, self.shares, self.codec = config, config.window(), shares, CodecConfig()
        self.profile_tiers, self.fixed_tiers, self.controller = profile.tiers, tiers, controller
        self.requests = Requests()
        self.control = LiveControl(controller, [s.index for s in shapes]) if controller is not None else None
        h, d, device = shapes[0].n_heads, shapes[0].head_dim, records[0].device
        self.arena = Pool(Budget(), Field((h, PAGE_TOKENS, d // 4), torch.uint8, device))
        self.arena.reserve(shares.slabs)
        if self.control is not None:
            self.control.on_firing = self._fired
        self.counts: Counter[str] = Counter()
        self.told = -math.inf
        self.decided = self.tiers
        self.layers: dict[int, Layer] = {}
        for n, (shape, scale, rows) in enumerate(zip(shapes, scaling, records)):
            encoder = PageEncoder(_heads_of(profile.layers[shape.index], shape), self.codec, scale, device)
            arena = BlockArena(shape.layout, dtype, rows, self.arena, shares.exact_pages, self.make_room)
            store = BlockStore(
                arena, self.requests.blocks, window=self.window, writer=page_writer(encoder, dtype),
                tiers=lambda n=n: self.tiers[n], name=f"layer {shape.index}",
            )  # fmt: skip
            basis = ReadBasis(encoder.q_forward, encoder.v_back, encoder.mean_v, encoder.kappa, encoder.scaling)
            self.layers[shape.index] = Layer(shape, store, encoder, basis)

    @property
    def tiers(self) -> list[tuple[int, int]]:
        """Bits of K and V for pages that close from now on, one pair a layer."""
        return self.fixed_tiers if self.controller is None else list(self.controller.tiers)

    @property
    def average_bits(self) -> float:
        """Average of :attr:`tiers`."""
        return sum(bits for pair in self.tiers for bits in pair) / (2 * len(self.tiers))

    @property
    def stores(self) -> list[BlockStore]:
        """Page stores, in the order in which the layers run."""
        return [layer.store for layer in self.layers.values()]

    def begin_step(self, output: Any) -> None:
        """Take in what the scheduler says of a step: requests that came, went, or go on, and their blocks.

        Parameters
        ----------
        output : SchedulerOutput
            vLLM's.
        """
        for name in [*output.finished_req_ids, *(output.preempted_req_ids or ())]:
            self._remove(name)
        running = output.scheduled_cached_reqs
        self.counts["preempted"] += len({*(output.preempted_req_ids or ()), *running.resumed_req_ids})
        for name in running.resumed_req_ids:
            self._remove(name)
        added = [
            b for new in output.scheduled_new_reqs for b in new.block_ids[0][new.num_computed_tokens // PAGE_TOKENS :]
        ]
        added += [b for new in running.new_block_ids if new is not None for b in new[0]]
        self._drop_stale(set(added), set(output.num_scheduled_tokens))
        for new in output.scheduled_new_reqs:
            self._remove(new.req_id)
            self._add(new.req_id, new.block_ids[0], new.num_computed_tokens)
        back: dict[int, int] = {}
        for name, blocks, computed in zip(running.req_ids, running.new_block_ids, running.num_computed_tokens):
            if name not in self.requests.index:
                self._add(name, blocks[0], computed)
                continue
            at = self.requests.index[name]
            if blocks is not None:
                self.requests.blocks[at] += blocks[0]
            if computed < self.length(at):
                back[at] = computed
        if back:
            lengths = [back.get(i, s.length) for i, s in enumerate(self.stores[0].sequences)]
            for store in self.stores:
                store.crop(lengths)

    def length(self, sequence: int) -> int:
        """Tokens stored of a sequence."""
        return self.stores[0].sequences[sequence].length

    def writers(self) -> dict[int, int]:
        """Block that a sequence's next token goes to -> the sequence; no two write to the same block."""
        blocks = enumerate(self.requests.blocks)
        return {own[at]: i for i, own in blocks if (at := self.length(i) // PAGE_TOKENS) < len(own)}

    def make_room(self, short: int) -> None:
        """Free at least ``short`` slots of the arena by dropping the planes of least predicted loss."""
        if self.config.deterministic:
            return
        wanted = max(short, int(self.arena.slots * SHED_SHARE))
        freed = len(self.arena.free)
        target = freed + wanted
        while len(self.arena.free) < target:
            cost = torch.stack([store.arena.losses() for store in self.stores])
            n = min(target - len(self.arena.free), int(torch.isfinite(cost).sum()))
            if n <= 0:
                break
            # Ties go by layer, then page, on all ranks alike.
            order = torch.sort(cost.flatten(), stable=True).indices[:n]
            _, pages, sides = cost.shape
            for flat in order.tolist():
                self.stores[flat // (pages * sides)].arena.shed(flat // sides % pages, flat % sides)
                self.counts["planes_shed"] += 1

    def stats(self) -> dict[str, Any]:
        """Figures of this worker: bytes by kind, bits, what was shed, and what the controller decided."""
        memory: Counter[str] = Counter()
        for store in self.stores:
            parts = store.memory()
            parts["codes"] -= self.arena.n_bytes
            memory.update(parts)
        memory["arena"] = self.arena.n_bytes
        packed, pages = (sum(x) for x in zip(*(store.arena.packed_bytes() for store in self.stores)))
        layout = self.stores[0].layout
        found: dict[str, Any] = {
            "requests": len(self.requests.names),
            "tokens": sum(s.length for s in self.stores[0].sequences),
            "bits_history": packed / (pages * layout.slab_bytes) if pages else None,
            "bits_average": self.average_bits,
            "tiers": self.tiers,
            "bytes": dict(memory),
            "arena_slots": self.arena.slots,
            "arena_used": self.arena.slots - len(self.arena.free),
            "exact_pages": self.shares.exact_pages,
            "exact_used": max(store.arena.exact.slots - len(store.arena.exact.free) for store in self.stores),
            "preempted": self.counts["preempted"],
            "planes_shed": self.counts["planes_shed"],
            "hits": self.counts["hits"],
            "hits_below_tier": self.counts["hits_below_tier"],
            "firings": self.counts["firings"],
            "tier_changes": self.counts["tier_changes"],
        }
        if self.controller is not None:
            found["controller"] = self.controller.snapshot()
            found["signals"] = [track.ema for track in self.controller.tracks]
        return found

    def tell(self, path: Path, engine: int) -> None:
        """Write the figures for those who serve them, at most once a second."""
        if time.monotonic() - self.told >= 1:
            self.told = time.monotonic()
            replace_json(path, {"engine": engine, **self.stats()})

    def _fired(self, firing: Firing) -> None:
        before, self.decided = self.decided, firing.tiers
        self.counts["firings"] += 1
        self.counts["tier_changes"] += sum(a != b for x, y in zip(before, firing.tiers) for a, b in zip(x, y))

    def _add(self, name: str, blocks: list[int], tokens: int) -> None:
        self.requests.add(name, blocks)
        for store in self.stores:
            store.add(tokens)
        hits = blocks[: tokens // PAGE_TOKENS]
        self.counts["hits"] += len(hits)
        if hits:
            below = max(store.arena.below_tier(hits) for store in self.stores)
            self.counts["hits_below_tier"] += below

    def _remove(self, name: str) -> None:
        if name in self.requests.index:
            at = self.requests.remove(name)
            for store in self.stores:
                store.remove(at)

    def _drop_stale(self, added: set[int], scheduled: set[str]) -> None:
        """Give up requests whose blocks went to others without word, as those of a preempted one may."""
        index, blocks = self.requests.index, self.requests.blocks
        for name in [x for x in index if x not in scheduled and not added.isdisjoint(blocks[index[x]])]:
            self._remove(name)


def _heads_of(layer: LayerProfile | None, shape: LayerShape) -> LayerProfile:
    """The profile of the KV heads that this worker has."""
    if layer is None:
        raise ConfigError(f"the profile has no layer {shape.index}; calibrate again")
    at = slice(shape.first_head, shape.first_head + shape.n_heads)
    if layer.n_kv_heads == shape.n_heads:
        return layer
    t = layer.transform
    transform = LayerTransform(t.k_forward[at], t.q_forward[at], t.v_forward[at], t.mean_v[at])
    return replace(
        layer, transform=transform, kappa=layer.kappa[at], q_energy=layer.q_energy[at], v_energy=layer.v_energy[at],
        moments=None,
    )  # fmt: skip
