"""Lamina in one vLLM worker: pages of all layers, the requests they belong to, and what is known of them."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lamina.attention.cuda.decode import MOST_QUERIES, NewRows, attend_cuda
from lamina.attention.cuda.parts import group_rows
from lamina.attention.cuda.prefill import EXPANDED, Itself, attend_groups
from lamina.attention.types import ReadBasis
from lamina.basis.encoder import PageEncoder
from lamina.basis.profile import LayerProfile, Profile
from lamina.basis.transforms import LayerTransform
from lamina.codec import PAGE_TOKENS, CodecConfig
from lamina.codec.gaussian import gaussian_rows
from lamina.control.live import LiveControl
from lamina.control.state import Controller, Firing
from lamina.engines.vllm.canary import StepCanary
from lamina.engines.vllm.closing import Tiers, closer_of
from lamina.engines.vllm.config import EngineConfig
from lamina.engines.vllm.metrics_file import replace_json
from lamina.engines.vllm.pages import BlockPages
from lamina.engines.vllm.sizes import LayerShape, Sizes
from lamina.errors import ConfigError, MemoryBudgetError
from lamina.pages.table import START
from lamina.pages.view import StoreView

SHED_SHARE = 1 / 64
"""Share of the arena that is freed at a time once it is full."""


@dataclass(frozen=True)
class Model:
    """What a worker's pages have to know of its model.

    Attributes
    ----------
    profile : Profile
        Calibrated for it.
    shapes : list of LayerShape
        The attention layers of this worker, in the order in which they run.
    scaling : list of float
        Factor on q.k, one a layer.
    dtype : torch.dtype
        Of the engine's rows.
    n_queries : int
        Query heads of this worker.
    most_requests, decode_tokens : int
        Requests of a step, and query tokens of one that decodes, at most.
    """

    profile: Profile
    shapes: list[LayerShape]
    scaling: list[float]
    dtype: torch.dtype
    n_queries: int
    most_requests: int
    decode_tokens: int = 1


@dataclass
class Request:
    """A request's blocks, in order of position, and what has become of its pages.

    Attributes
    ----------
    blocks : list of int
        All that it has.
    length : int
        Tokens that are stored and stay, those of the step that runs included.
    opened, closed : int
        How many of its blocks, from the first on, are pages already, and how many of them are full and encoded.
    held : deque of int
        Pages past the sink whose exact rows it holds, oldest first.
    """

    blocks: list[int]
    length: int = 0
    opened: int = 0
    closed: int = 0
    held: deque[int] = field(default_factory=deque)


def on_one_rank(x: Any) -> Any:
    """The mean over ranks, of one."""
    return x


class WorkerState:
    """Pages of one worker.

    Parameters
    ----------
    config : EngineConfig
        What the user set.
    model : Model
        What is served.
    records : list of Tensor
        uint8 ``[blocks, record_bytes]`` a layer: vLLM's own memory.
    shares : Sizes
        How large the pools are.
    tiers : list of (int, int)
        Bits to start with, one pair a layer.
    controller : Controller, optional
        Decides the tiers.
    mean_losses : callable
        Averages predicted losses over the ranks of tensor parallelism, that all shed alike.
    """

    def __init__(
        self, config: EngineConfig, model: Model, records: list[Tensor], shares: Sizes, tiers: list[tuple[int, int]],
        controller: Controller | None = None, mean_losses: Callable[[Tensor], Tensor] = on_one_rank,
    ) -> None:  # fmt: skip
        self.config, self.model, self.shares, self.codec = config, model, shares, CodecConfig()
        self.window, self.mean_losses = config.window(), mean_losses
        self.fixed_tiers, self.controller = tiers, controller
        device = records[0].device
        self.pages = BlockPages(model.shapes[0].layout, model.dtype, records, shares.slabs, shares.exact_pages)
        encoders = [
            PageEncoder(_heads_of(model.profile.layers[s.index], s), self.codec, scale, device)
            for s, scale in zip(model.shapes, model.scaling)
        ]
        self.bases = [ReadBasis(e.q_forward, e.v_back, e.mean_v, e.kappa, e.scaling) for e in encoders]
        self.closer = closer_of(self.pages, encoders, model.dtype)
        self.requests: dict[str, Request] = {}
        self.counts: Counter[str] = Counter()
        self.told = self.kept_at = -math.inf
        self.kept_firings, self.decided = 0, self.tiers
        self._damaged = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.canary: StepCanary | None = None
        if controller is not None:
            control = LiveControl(controller, [s.index for s in model.shapes])
            control.on_firing = self._fired
            self.canary = StepCanary(
                control, self.pages, self.bases, encoders, model.n_queries, model.most_requests, model.decode_tokens,
                self.window,
            )  # fmt: skip

    @property
    def tiers(self) -> list[tuple[int, int]]:
        """Bits of K and V for pages that close from now on, one pair a layer."""
        return self.fixed_tiers if self.controller is None else list(self.controller.tiers)

    @property
    def average_bits(self) -> float:
        """Average of :attr:`tiers`."""
        return sum(bits for pair in self.tiers for bits in pair) / (2 * len(self.tiers))

    def view(self, layer: int, page_ids: Tensor, lengths: Tensor) -> StoreView:
        """What attention of a layer, counted as they run, reads of sequences."""
        return self.pages.view(layer, page_ids, lengths, self.window)

    def warm_up(self, itself: Itself) -> None:
        """Have a GPU's kernels compiled before the first request asks for them; chunks attend to themselves so."""
        pages, model = self.pages, self.model
        if pages.device.type == "cpu":
            return
        (h, d), n_q, n = (pages.layout.n_heads, pages.layout.head_dim), model.n_queries, model.decode_tokens
        q, k, v = (torch.zeros(EXPANDED, x, d, dtype=model.dtype, device=pages.device) for x in (n_q, h, h))
        nobody = torch.full((1, 1), -1, dtype=torch.int32, device=pages.device)
        view, basis = self.view(0, nobody, torch.zeros_like(nobody[0])), self.bases[0]
        of = [x[None, :n].transpose(1, 2) for x in (q, k, v)]
        if n_q // h * n <= MOST_QUERIES:
            attend_cuda(of[0], view, basis, new=NewRows(of[1], of[2], self.closer.damaged, 0))
        if self.canary is not None:
            attend_cuda(of[0][:, :, :1], view, replace(basis, rows=gaussian_rows(self.codec, d)))
        attend_groups(q, view, basis, (k, v), group_rows([EXPANDED], n_q, d, pages.device), itself=itself)
        self.closer.write(0, k[:1], v[:1], torch.full((1,), -1, device=pages.device), view)
        pages.touch(0)
        pages.flush()

    def begin_step(self, output: Any) -> None:
        """Take in what the scheduler says of a step: requests that came, went, or go on, and their blocks.

        Parameters
        ----------
        output : SchedulerOutput
            vLLM's.
        """
        if self.canary is not None:
            self.canary.end_step()
        self._close([p for r in self.requests.values() for p in _full(r, r.length)])
        running, counts = output.scheduled_cached_reqs, output.num_scheduled_tokens
        preempted = output.preempted_req_ids or ()
        self.counts["preempted"] += len({*preempted, *running.resumed_req_ids} & self.requests.keys())
        # Sets come in another order on every rank.
        for names in (output.finished_req_ids, preempted, running.resumed_req_ids):
            for name in sorted(names):
                self._remove(name)
        added = [
            b for new in output.scheduled_new_reqs for b in new.block_ids[0][new.num_computed_tokens // PAGE_TOKENS :]
        ]
        resumed = running.resumed_req_ids
        for name, new, computed in zip(running.req_ids, running.new_block_ids, running.num_computed_tokens):
            if new is not None:
                added += new[0][computed // PAGE_TOKENS :] if name in resumed else new[0]
        self._drop_stale(set(added), set(counts))
        planned: list[int] = []
        drafts = getattr(output, "scheduled_spec_decode_tokens", {})
        starting = [(new.num_computed_tokens, new.req_id, new.block_ids[0]) for new in output.scheduled_new_reqs]
        going = []
        for name, blocks, computed in zip(running.req_ids, running.new_block_ids, running.num_computed_tokens):
            if name in self.requests:
                going.append((name, blocks, computed))
            else:
                starting.append((computed, name, blocks[0]))
        # What decoding fills may be found at once, by a prompt behind which it would lie too far back to stay open.
        decoding = len(set(counts.values())) == 1 and max(counts.values()) <= self.model.decode_tokens
        found = set() if decoding else {b for n, _, blocks in starting for b in blocks[: n // PAGE_TOKENS]}
        for name, blocks, computed in going:
            if blocks is not None:
                self.requests[name].blocks += blocks[0]
            planned += self._advance(name, computed, counts[name], len(drafts.get(name, ())), found)
        # Those that start may find blocks that others fill in this step, who have fewer tokens stored then.
        for computed, name, blocks in sorted(starting, key=lambda x: x[0]):
            self._remove(name)
            self._add(name, blocks, computed)
            planned += self._advance(name, computed, counts[name], len(drafts.get(name, ())), found)
        self._plan(planned)
        self.pages.flush()
        if self.canary is not None:
            longest = max((r.length for r in self.requests.values()), default=0)
            self.canary.begin_step(next(iter(counts.values())) if decoding else None, longest)

    def stats(self, wait: bool = True) -> dict[str, Any]:
        """Figures of this worker: bytes by kind, bits, what was shed, and what the controller decided.

        ``wait``: until a GPU has counted the numbers that were not finite, or else what it had at the last call.
        """
        damaged = int(self._damaged)
        self._damaged.copy_(self.closer.damaged, non_blocking=not wait)
        damaged = int(self._damaged) if wait else damaged
        packed, pages = self.pages.packed_bytes()
        arena, exact = self.pages.free_slabs, self.pages.free_exact
        counted = ("preempted", "planes_shed", "hits", "hits_below_tier", "firings", "tier_changes")
        found: dict[str, Any] = {
            "requests": len(self.requests),
            "tokens": sum(r.length for r in self.requests.values()),
            "bits_history": packed / (pages * self.pages.layout.slab_bytes) if pages else None,
            "bits_average": self.average_bits,
            "tiers": self.tiers,
            "bytes": self.pages.memory(),
            "arena_slots": arena.size,
            "arena_used": arena.used,
            "exact_pages": exact.size,
            "exact_used": exact.used,
            "non_finite": damaged,
            **{name: self.counts[name] for name in counted},
        }
        if self.controller is not None:
            found["controller"] = {k: x for k, x in self.controller.snapshot().items() if k != "random"}
            found["signals"] = [track.ema for track in self.controller.tracks]
        return found

    def tell(self, path: Path, engine: int) -> None:
        """Write the figures for those who serve them, at most once a second."""
        if time.monotonic() - self.told >= 1:
            self.told = time.monotonic()
            replace_json(path, {"engine": engine, **self.stats(wait=False)})

    def _fired(self, firing: Firing) -> None:
        before, self.decided = self.decided, firing.tiers
        self.counts["firings"] += 1
        self.counts["tier_changes"] += sum(a != b for x, y in zip(before, firing.tiers) for a, b in zip(x, y))

    def _add(self, name: str, blocks: list[int], tokens: int) -> None:
        """Add a request whose first tokens are stored in its blocks already."""
        n = tokens // PAGE_TOKENS
        hits, first = blocks[:n], max(self.window.sink, self.window.exact_from(tokens))
        held = [p for i, p in enumerate(hits) if i * PAGE_TOKENS >= first and self.pages.exact_slot(p) >= 0]
        self.pages.retain(hits, held)
        self.pages.drop_unheld(hits[self.window.sink // PAGE_TOKENS :])
        self.requests[name] = Request(list(blocks), tokens, n, n, deque(held))
        self.counts["hits"] += n
        self.counts["hits_below_tier"] += self.pages.below_tier(hits) if hits else 0

    def _remove(self, name: str) -> None:
        request = self.requests.pop(name, None)
        if request is not None:
            self.pages.release(request.blocks[: request.opened], request.held)

    def _drop_stale(self, added: set[int], scheduled: set[str]) -> None:
        """Give up requests whose blocks went to others without word, as those of a preempted one may."""
        for name in [x for x, r in self.requests.items() if x not in scheduled and not added.isdisjoint(r.blocks)]:
            self._remove(name)

    def _advance(self, name: str, computed: int, n: int, drafts: int, found: set[int]) -> list[int]:
        """Open pages for the next ``n`` tokens of a request, ``drafts`` of which may be taken back.

        Returns
        -------
        list of int
            Pages that close within the step: those that a part of a prompt fills, or that are ``found`` by others. What
            else decoding fills closes before the next step, when it is known which tokens stay.
        """
        request, window = self.requests[name], self.window
        if computed < request.closed * PAGE_TOKENS:
            raise RuntimeError(
                f"request {name} goes back to token {computed}, but {request.closed * PAGE_TOKENS} are encoded already"
            )
        self._close(_full(request, computed))
        past = max(window.sink, window.exact_from(computed))
        gone = []
        starts = self.pages.cells[0, :, START]
        while request.held and starts[request.held[0]] < past and not self.pages.is_open(request.held[0]):
            gone.append(request.held.popleft())
        if gone:
            self.pages.let_go(gone)
        known = computed + n - drafts
        closes = known // PAGE_TOKENS
        if n <= self.model.decode_tokens and found.isdisjoint(request.blocks[request.closed : closes]):
            closes = request.closed
        last, recent = -(-(computed + n) // PAGE_TOKENS), window.exact_from(known)
        new = range(request.opened, last)
        if new:
            at = [i * PAGE_TOKENS for i in new]
            exact = [i >= closes or start < window.sink or start >= recent for i, start in zip(new, at)]
            held = [has and start >= window.sink for has, start in zip(exact, at)]
            pages = request.blocks[request.opened : last]
            self.pages.open(pages, at, exact, held)
            request.held.extend(page for page, holds in zip(pages, held) if holds)
            request.opened = last
        planned = request.blocks[request.closed : closes]
        request.closed, request.length = max(request.closed, closes), known
        return planned

    def _close(self, pages: list[int]) -> None:
        """Encode pages now, from their exact rows."""
        if pages:
            tiers = self._room(len(pages))
            self.pages.close(pages, tiers)
            self.closer.now(pages, tiers)

    def _plan(self, pages: list[int]) -> None:
        """Have pages encoded within the step."""
        tiers: Tiers = self._room(len(pages)) if pages else []
        if pages:
            self.pages.close(pages, tiers)
        self.closer.plan(pages, tiers)

    def _room(self, n: int) -> Tiers:
        """Bits of ``n`` pages that close: the tiers, or as many as there is room for once planes were shed."""
        slots = self.pages.free_slabs
        for most in (8, 4, 2):
            tiers = [(min(k, most), min(v, most)) for k, v in self.tiers]
            short = self.pages.slabs_needed(n, tiers) - slots.left
            if short > 0 and not self.config.deterministic:
                wanted = max(short, int(slots.size * SHED_SHARE))
                self.counts["planes_shed"] += self.pages.shed(wanted, self.mean_losses)
                short = self.pages.slabs_needed(n, tiers) - slots.left
            if short <= 0:
                return tiers
            if self.config.deterministic:
                break
        raise MemoryBudgetError(f"the arena is full: {short} slots more are needed of {slots.size}")


def _full(request: Request, tokens: int) -> list[int]:
    """Pages that the first ``tokens`` tokens fill and that are not encoded yet; they count as encoded from now on."""
    n = tokens // PAGE_TOKENS
    if n <= request.closed:
        return []
    pages = request.blocks[request.closed : n]
    request.closed = n
    return pages


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
