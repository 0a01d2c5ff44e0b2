"""Builders shared by the tests: random bases, stores with scripted tiers, tiny models, and views for the oracle."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

import oracle
from lamina.attention.types import ReadBasis
from lamina.basis.encoder import PageEncoder
from lamina.basis.profile import LayerProfile
from lamina.basis.transforms import LayerTransform
from lamina.codec import CodecConfig
from lamina.pages import Budget, EncodingWriter, LayerStore, StoreView, WindowConfig

START, ROWS, TIER, FINE, FINEST, EXACT = 0, 1, 2, 4, 6, 10
Tiers = tuple[int, int]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_orthogonal(n: int, dim: int, g: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(n, dim, dim, generator=g, dtype=torch.float64)).Q


def layer_profile(heads: int, dim: int, seed: int = 0, plain: bool = False) -> LayerProfile:
    """Random well-conditioned bases in bfloat16, neither orthogonal nor symmetric; with ``plain`` the identity."""
    g = generator(seed)
    eye = torch.eye(dim, dtype=torch.float64).repeat(heads, 1, 1)
    a, r, mean = eye, eye, torch.zeros(heads, dim)
    kappa = torch.zeros(heads, 3, 3)
    if not plain:
        stretch = torch.linspace(0.5, 2, dim, dtype=torch.float64)
        left, right = random_orthogonal(heads, dim, g), random_orthogonal(heads, dim, g)
        a = left * stretch @ right
        r = random_orthogonal(heads, dim, g)
        mean = torch.randn(heads, dim, generator=g)
        kappa = 0.05 + 0.2 * torch.rand(heads, 3, 3, generator=g)
    stored = LayerTransform(a, a, r, mean).stored()
    transform = LayerTransform(stored.k_forward, stored.q_forward, stored.v_forward, stored.mean_v)
    energy = 1 + torch.rand(2, heads, generator=g)
    return LayerProfile(transform, kappa, energy[0] * dim, energy[1] * dim)


class Script:
    """Tiers handed out one pair a call, for stores that append page by page."""

    def __init__(self, tiers: Iterable[Tiers]) -> None:
        self.tiers: Iterator[Tiers] = iter(tiers)

    def __call__(self) -> Tiers:
        return next(self.tiers)


def make_store(
    heads: int,
    dim: int,
    *,
    tiers: Tiers | Callable[[], Tiers] = (2, 2),
    window: WindowConfig | None = None,
    dtype: torch.dtype = torch.float32,
    codec: CodecConfig | None = None,
    budget: Budget | None = None,
    profile: LayerProfile | None = None,
    name: str = "layer 0",
    mirrored: bool = False,
) -> tuple[LayerStore, ReadBasis]:
    """Store of one layer, and the basis to read it with."""
    codec = codec or CodecConfig()
    encoder = PageEncoder(profile or layer_profile(heads, dim), codec, dim**-0.5, "cpu")
    hand_out = tiers if callable(tiers) else repeat(tiers).__next__
    store = LayerStore(
        heads, dim, dtype, "cpu", window=window or WindowConfig(), writer=EncodingWriter(encoder), tiers=hand_out,
        budget=budget or Budget(), centered=codec.center, name=name, mirrored=mirrored,
    )  # fmt: skip
    basis = ReadBasis(encoder.q_forward, encoder.v_back, encoder.mean_v, encoder.kappa, encoder.scaling)
    return store, basis


def random_rows(
    batch: int, heads: int, tokens: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Keys with a channel offset and values, ``[B, H, T, D]``."""
    g = generator(seed)
    k, v = torch.randn(2, batch, heads, tokens, dim, generator=g)
    return (k + 2 * torch.randn(1, heads, 1, dim, generator=g)).to(dtype), v.to(dtype)


def fill(store: LayerStore, k: Tensor, v: Tensor, chunk: int | None = None, start: int = 0) -> None:
    """Append rows in chunks."""
    for t in range(start, k.shape[2], chunk or k.shape[2]):
        end = min(k.shape[2], t + (chunk or k.shape[2]))
        store.append(k[:, :, t:end], v[:, :, t:end])


def stored(view: StoreView) -> oracle.Stored:
    """What the oracle reads of a view: bytes, not the product's own typed views."""
    return oracle.Stored(
        records=view.records.numpy(),
        slabs=view.slabs.numpy(),
        exact=view.exact.double().numpy(),
        table=view.table.numpy(),
        page_ids=view.page_ids.numpy(),
        lengths=view.lengths.numpy(),
        n_heads=view.layout.n_heads,
        dim=view.layout.head_dim,
        centered=view.layout.centered,
        sink=view.window.sink,
        recent=view.window.recent,
    )


def oracle_basis(basis: ReadBasis) -> oracle.Basis:
    tensors = (basis.q_forward, basis.v_back, basis.mean_v, basis.kappa)
    sinks = None if basis.sinks is None else basis.sinks.double().numpy()
    variance = None if basis.rows is None else np.array(basis.rows.variance)
    aligned = basis.rows is None or basis.rows.aligned
    return oracle.Basis(
        *(t.double().numpy() for t in tensors), basis.scaling, basis.softcap, sinks, variance, aligned
    )  # fmt: skip


def page_contents(store: LayerStore, sequence: int) -> list[dict[str, Any]]:
    """All that is defined of a sequence's pages, oldest first, independent of slot numbers."""
    view = store.view()
    s = stored(view)
    found = []
    for page in s.page_ids[sequence]:
        if page < 0:
            continue
        start, rows, tier_k, tier_v = (int(x) for x in s.table[page, :4])
        content: dict[str, Any] = {"start": start, "rows": rows, "tiers": (tier_k, tier_v)}
        if tier_k:
            content["record"] = s.defined(page).tobytes()
            content["slabs"] = [[s.slabs[i].tobytes() for i in s.slots(page, side)] for side in (0, 1)]
        slot = int(s.table[page, EXACT])
        if slot >= 0:
            raw = view.exact[slot, :, :, :rows].contiguous()
            content["exact"] = raw.view(torch.uint8).numpy().tobytes()
        found.append(content)
    return found


def without_exact(pages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: x for name, x in page.items() if name != "exact"} for page in pages]


def storage_bytes(store: LayerStore) -> int:
    """Bytes of every tensor that the store owns, found without its own accounting."""
    tensors = [t for pool in store.arena.pools for t in pool.data] + [store.page_ids(), store.view().page_ids]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def check_slots(store: LayerStore) -> None:
    """Every slot is used once or free once, and never both."""
    table = store.arena.table
    everyone = [*store.sequences, *(s for snapshot in store.snapshots for s in snapshot)]
    users, holders = Counter(p for s in everyone for p in s.pages), Counter(p for s in everyone for p in s.held)
    pages = sorted(users)
    counts = store.arena.counts.tolist()
    assert [c[:2] for c in counts] == [[users[p], holders[p]] for p in range(len(counts))]
    for p in pages:
        past_sink = int(table[p, 0]) >= store.window.sink
        assert (int(table[p, EXACT]) >= 0) == (holders[p] > 0) or not past_sink
    for pool, used in (
        (store.arena.pages, pages),
        (store.arena.slabs, [x for p in pages for x in table[p, FINE:EXACT].tolist() if x >= 0]),
        (store.arena.exact, [x for p in pages for x in table[p, EXACT:].tolist() if x >= 0]),
    ):
        assert sorted(used + pool.free) == list(range(pool.slots))


def relative_error(ours: np.ndarray, expected: np.ndarray) -> float:
    """Largest error of a row, relative to that row."""
    norm = np.linalg.norm(expected, axis=-1)
    return float((np.linalg.norm(ours - expected, axis=-1) / norm).max())


def poison(store: LayerStore) -> None:
    """Fill everything that is not defined with NaN or ones: rows, slots and records nobody wrote."""
    records, slabs, exact = (pool.data[0] for pool in store.arena.pools)
    used = {p for s in store.sequences for p in s.pages}
    for page in range(len(records)):
        row = store.arena.table[page].tolist()
        layout = store.layout
        end = layout.center_scale_offset + 2 * layout.n_heads * layout.centered
        records[page, end if page in used and row[TIER] else 0 :] = 255
        if page in used and row[EXACT] >= 0:
            exact[row[EXACT], :, :, row[ROWS] :] = float("nan")
    slabs[store.arena.slabs.free] = 255
    exact[store.arena.exact.free] = float("nan")
