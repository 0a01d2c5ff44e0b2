"""What ``lamina plan`` does: how many tokens and requests fit into a given memory, by arithmetic alone."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from lamina.app.loading import DTYPES, LOADING_ERRORS, load_config
from lamina.app.screen import Screen
from lamina.app.values import format_bytes, parse_bytes, parse_tier, tier_name
from lamina.basis.geometry import ModelGeometry, model_geometry
from lamina.basis.profile import Profile
from lamina.codec import PAGE_TOKENS
from lamina.codec.packing import slabs_beyond_base
from lamina.engines.vllm.pages import BOOK_BYTES
from lamina.engines.vllm.sizes import LayerShape, chunk_pages, request_pages
from lamina.errors import ConfigError, UnsupportedModelError
from lamina.pages import Budget, LayerStore, WindowConfig
from lamina.pages.ids import table_bytes
from lamina.pages.pool import GROWTH

DEFAULT_TIERS = ("2", "k4v2", "4", "8")
TRANSFORMERS, VLLM = ENGINES = ("transformers", "vllm")


@dataclass(frozen=True)
class PlanRequest:
    """What memory, for which model; fields are the options of ``lamina plan``."""

    model: str
    memory: str
    context: int | None = None
    tiers: Sequence[str] = DEFAULT_TIERS
    profile: Path | None = None
    dtype: str = "bfloat16"
    max_batch: int = 1
    reserve: float = 10.0
    sink: int = 64
    recent: int = 256
    engine: str = TRANSFORMERS
    batched_tokens: int = 8192


@dataclass(frozen=True)
class PlanRow:
    """What one way of keeping the cache needs and allows.

    Attributes
    ----------
    name : str
        ``bf16``, ``fp8`` or the tier vector.
    bytes_per_token : float
        Of one request at the context, everything included.
    request_bytes : int
        Of one request at the context.
    max_tokens : int
        Longest context that each of ``max_batch`` requests can have at once, whatever the model's maximum.
    requests : int
        Requests at the context that fit at once.
    """

    name: str
    bytes_per_token: float
    request_bytes: int
    max_tokens: int
    requests: int


@dataclass(frozen=True)
class Plan:
    """How the memory is spent, and what fits into the rest."""

    model: str
    dtype: str
    memory_bytes: int
    reserve_bytes: int
    weight_bytes: int
    cache_bytes: int
    context: int
    max_positions: int
    max_batch: int
    rows: list[PlanRow]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """The document that ``--json`` writes."""
        return asdict(self)


def make_plan(request: PlanRequest, screen: Screen) -> Plan:
    """Work out what fits; reads the model's configuration only.

    Raises
    ------
    ConfigError
        A setting cannot work, or the weights alone do not fit.
    """
    memory = parse_bytes(request.memory, "--memory")
    if request.dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {request.dtype!r}; choose {', '.join(DTYPES)}")
    if not 0 <= request.reserve < 100:
        raise ConfigError(f"--reserve {request.reserve} is not a percentage from 0 to below 100")
    dtype = DTYPES[request.dtype]
    if request.engine not in ENGINES:
        raise ConfigError(f"unknown engine {request.engine!r}; choose {' or '.join(ENGINES)}")
    on_vllm = request.engine == VLLM
    window = WindowConfig(request.sink, request.recent)
    if on_vllm:
        # It never takes back what is encoded, so nothing is kept for that.
        window = replace(window, rollback=0)
    vectors = {tier_name(parse_tier(t)): [parse_tier(t)] for t in request.tiers}
    config = load_config(request.model, screen)
    geometry = model_geometry(config)
    if request.profile is not None:
        profile = Profile.load(request.profile)
        profile.check_model(geometry)
        vectors["profile's"] = list(profile.tiers)
    context = request.context or geometry.max_positions
    weights = weight_bytes(config, dtype)
    reserve = int(memory * request.reserve / 100)
    free = memory - reserve - weights
    if free <= 0:
        raise ConfigError(
            f"the weights of {request.model} take {format_bytes(weights)} in {request.dtype}, which leaves nothing of "
            f"{format_bytes(memory)} less a reserve of {format_bytes(reserve)}; plan with more --memory"
        )

    def plain(tokens: int) -> int:
        return geometry.elements(tokens) + geometry.window_elements(tokens)

    chunk = chunk_bytes(geometry, request.batched_tokens, dtype) if on_vllm else 0
    if free <= chunk:
        raise ConfigError(
            f"exact rows of a step's {request.batched_tokens:,} tokens take {format_bytes(chunk)}, more than the "
            f"{format_bytes(free)} that are left; plan with a lower --batched-tokens"
        )
    each = partial(served_bytes if on_vllm else sequence_bytes, geometry, dtype=dtype, window=window)
    plans: dict[str, tuple[Callable[[int], int], int]] = {"bf16": (lambda t: 2 * plain(t), 0), "fp8": (plain, 0)}
    plans |= {name: (partial(each, tiers), chunk) for name, tiers in vectors.items()}
    return Plan(
        model=request.model,
        dtype=request.dtype,
        memory_bytes=memory,
        reserve_bytes=reserve,
        weight_bytes=weights,
        cache_bytes=free,
        context=context,
        max_positions=geometry.max_positions,
        max_batch=request.max_batch,
        rows=[_row(name, size, context, free - fixed, request.max_batch) for name, (size, fixed) in plans.items()],
        notes=_notes(config, geometry, context, window, request),
    )


def sequence_bytes(
    geometry: ModelGeometry, tiers: Sequence[tuple[int, int]], tokens: int, dtype: torch.dtype, window: WindowConfig
) -> int:
    """Bytes of the cache of one sequence, all told: pages, planes, exact windows with roll-back, tables.

    Sliding-window layers, which stay with transformers, count with the tokens of their window.

    What a :class:`lamina.engines.hf.LaminaCache` allocates while it decodes. Its pools grow in steps, by at most 1/32
    of this; and while a chunk of prompt is read, exact rows of as many pages as it touches are there as well, though
    never more than one recent window.

    Parameters
    ----------
    geometry : ModelGeometry
        Of the model.
    tiers : sequence of (int, int)
        Bits of K and V: one pair for all layers, or one a layer.
    tokens : int
        Tokens stored.
    dtype : torch.dtype
        Of the exact rows.
    window : WindowConfig
        Exact windows.
    """
    if len(tiers) not in (1, geometry.n_layers):
        raise ConfigError(f"{len(tiers)} tiers do not fit {geometry.n_layers} layers; give one pair, or one a layer")
    pages, closed = -(-tokens // PAGE_TOKENS), tokens // PAGE_TOKENS
    windowed = (window.sink + window.recent + window.rollback) // PAGE_TOKENS + 1
    total = dtype.itemsize * geometry.window_elements(tokens)
    layers = Counter(((g.n_kv_heads, g.head_dim), tiers[i % len(tiers)]) for i, g in geometry.packed.items())
    for (shape, (k, v)), n in layers.items():
        page, slab, exact = slot_bytes(*shape, dtype)
        fixed = pages * page + table_bytes(1, pages, mirrored=True) + min(pages, windowed) * exact
        total += n * (fixed + closed * slab * slabs_beyond_base((k, v)))
    return total


def served_bytes(
    geometry: ModelGeometry, tiers: Sequence[tuple[int, int]], tokens: int, dtype: torch.dtype, window: WindowConfig
) -> int:
    """Bytes of one request in vLLM, whose blocks and pools are of a fixed size: as :func:`sequence_bytes`."""
    pages, kept, total = -(-tokens // PAGE_TOKENS), request_pages(window), 0
    for i, shape in _shapes(geometry).items():
        layout = shape.layout
        planes = slabs_beyond_base(tiers[i % len(tiers)])
        total += pages * (layout.record_bytes + BOOK_BYTES + planes * layout.slab_bytes)
        total += kept * shape.exact_bytes(dtype.itemsize)
    return total


def chunk_bytes(geometry: ModelGeometry, batched_tokens: int, dtype: torch.dtype) -> int:
    """Bytes that vLLM sets aside for exact rows of the prompts of a step."""
    return chunk_pages(batched_tokens) * sum(s.exact_bytes(dtype.itemsize) for s in _shapes(geometry).values())


def _shapes(geometry: ModelGeometry) -> dict[int, LayerShape]:
    return {i: LayerShape(i, g.n_kv_heads, 0, g.head_dim) for i, g in geometry.packed.items()}


@lru_cache
def slot_bytes(n_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Bytes that a page store takes for a page (record and table rows), a slab, and a page's exact rows."""
    store = LayerStore(
        n_heads,
        head_dim,
        dtype,
        "meta",
        window=WindowConfig(),
        writer=_NoWriter(),
        tiers=lambda: (2, 2),
        budget=Budget(),
    )
    return store.arena.pages.slot_bytes, store.arena.slabs.slot_bytes, store.arena.exact.slot_bytes


def weight_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the model's parameters and buffers in ``dtype``, tied ones once; nothing is allocated."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except LOADING_ERRORS as error:
        reason = str(error).strip().split("\n")[0]
        raise UnsupportedModelError(f"transformers cannot build a language model of this kind: {reason}") from error
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.itemsize for t in tensors)


def longest(size: Callable[[int], int], budget: int) -> int:
    """Most tokens whose ``size`` is within ``budget``; ``size`` never falls."""
    low, high = 0, 1
    while size(high) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= budget else (low, middle)
    return low


class _NoWriter:
    """A store that is only measured writes nothing."""

    def write(self, *args: Any) -> Any:
        raise NotImplementedError


def _row(name: str, size: Callable[[int], int], context: int, free: int, max_batch: int) -> PlanRow:
    request = size(context)
    return PlanRow(name, request / context, request, longest(size, free // max_batch), free // request)


def _notes(config: Any, geometry: ModelGeometry, context: int, window: WindowConfig, request: PlanRequest) -> list[str]:
    exact = window.sink + window.recent + window.rollback + PAGE_TOKENS
    of_engine = f"pools grow in steps, up to {GROWTH:.0%} more, unless max_bytes is set"
    if request.engine == VLLM:
        of_engine = (
            f"{request.batched_tokens:,} tokens of prompts a step have exact rows besides; give --max-num-seqs as many "
            "requests as fit, for exact rows are set aside for each"
        )
    notes = [f"Lamina's rows include {exact} exact tokens a request, page tables and all scales; {of_engine}."]
    if context > geometry.max_positions:
        notes.append(f"The model was made for {geometry.max_positions:,} positions, fewer than the context asked for.")
    if getattr(config, "quantization_config", None):
        notes.append("The checkpoint's weights are quantised; they were counted unquantised, so more will fit.")
    return notes
