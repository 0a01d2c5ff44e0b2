"""A layer's pages as plain tensors, and back with every index checked."""

import torch
from torch import Tensor

from lamina.codec import PAGE_TOKENS, TIERS
from lamina.codec.packing import SLABS_OF_BITS
from lamina.errors import CacheStateError
from lamina.pages.arena import USERS, Arena
from lamina.pages.store import LayerStore, Sequence
from lamina.pages.table import EXACT, FINE, FINEST, ROWS, START, TIER

POOLS = ("records", "table", "loss", "slabs", "exact")


def dump_store(store: LayerStore) -> dict[str, Tensor]:
    """Tensors of a store without free slots: its pools, and the pages of every sequence and which it holds.

    ``pages`` is int32 ``[B, P]`` padded with -1, ``held`` bool ``[B, P]``.
    """
    store.compact()
    records, table, loss = store.arena.pages.data[:3]
    pages = store.page_ids()
    held = torch.zeros(pages.shape, dtype=torch.bool)
    for b, s in enumerate(store.sequences):
        for i, page in enumerate(s.pages):
            held[b, i] = page in s.held
    pools = (records, table, loss, *(pool.data[0] for pool in store.arena.pools[1:]))
    return {**dict(zip(POOLS, pools)), "pages": pages, "held": held}


def restore_store(store: LayerStore, tensors: dict[str, Tensor], lengths: list[int]) -> None:
    """Fill an empty store; raises CacheStateError if the tensors do not describe whole sequences."""
    for name in (*POOLS, "pages", "held"):
        if name not in tensors:
            raise CacheStateError(f"{store.name}: {name} is missing; read the prompt again")
    arena = store.arena
    for name, mine in zip(POOLS, _targets(arena)):
        given = tensors[name]
        if given.shape[1:] != mine.shape[1:] or given.dtype != mine.dtype:
            raise CacheStateError(
                f"{store.name}: {name} has {given.dtype} rows of shape {tuple(given.shape[1:])}, expected {mine.dtype} "
                f"{tuple(mine.shape[1:])}; read the prompt again"
            )
    _check_tables(store, tensors, lengths)
    records, slabs, exact = sizes = [tensors[name].shape[0] for name in ("records", "slabs", "exact")]
    arena.reserve(records, slabs, exact, 4 * tensors["pages"].numel())
    for pool, n in zip(arena.pools, sizes):
        pool.release([pool.allocate() for _ in range(n)])
        pool.free = [slot for slot in pool.free if slot >= n]
    for name, mine in zip(POOLS, _targets(arena)):
        mine[: tensors[name].shape[0]] = tensors[name].to(mine.device)
    arena.changed.update(range(records if arena.mirrored else 0))
    for ids, held, length in zip(tensors["pages"].tolist(), tensors["held"].tolist(), lengths):
        pages = [p for p in ids if p >= 0]
        s = Sequence(pages, [p for p, h in zip(pages, held) if h], length)
        arena.retain(s.pages, s.held)
        store.sequences.append(s)
    if bool((arena.counts[: sizes[0], USERS] == 0).any()):
        raise CacheStateError(f"{store.name}: pages belong to no sequence; read the prompt again")
    store.compact()


def _targets(arena: Arena) -> list[Tensor]:
    return [*arena.pages.data[:3], *(pool.data[0] for pool in arena.pools[1:])]


def _check_tables(store: LayerStore, tensors: dict[str, Tensor], lengths: list[int]) -> None:
    table, pages, held = tensors["table"].long(), tensors["pages"].long(), tensors["held"]
    wrong = CacheStateError(f"{store.name}: the page table does not describe whole sequences; read the prompt again")
    n = tensors["records"].shape[0]
    if pages.dim() != 2 or held.shape != pages.shape or len(pages) != len(lengths) or len(table) != n:
        raise wrong
    if bool((pages >= n).any()) or bool((pages < -1).any()):
        raise wrong
    slots = table[:, FINE:EXACT]
    for used, count in (
        (slots[slots >= 0], len(tensors["slabs"])),
        (table[:, EXACT], len(tensors["exact"])),
    ):
        used = used[used >= 0]
        if len(used) != len(used.unique()) or bool((used >= count).any()):
            raise wrong
    for side in (0, 1):
        tier, fine = table[:, TIER + side], table[:, FINE + side]
        finest = table[:, FINEST + 2 * side : FINEST + 2 * side + 2]
        have = 1 + (fine >= 0).long() + (finest >= 0).sum(1)
        most = torch.tensor([SLABS_OF_BITS[b] if b in TIERS else 1 for b in tier.tolist()], dtype=torch.long)
        known = torch.tensor([b in (0, *TIERS) for b in tier.tolist()], dtype=torch.bool)
        if not bool((known & (have <= most)).all()) or bool(((finest >= 0).any(1) & (have != 4)).any()):
            raise wrong
    if bool(((table[:, TIER] == 0) & (table[:, EXACT] < 0)).any()):
        raise wrong
    for ids, holds, length in zip(pages.tolist(), held.tolist(), lengths):
        at = 0
        for page, hold in zip(ids, holds):
            if page < 0:
                continue
            start, rows = int(table[page, START]), int(table[page, ROWS])
            if start != at or not 0 < rows <= PAGE_TOKENS or (hold and int(table[page, EXACT]) < 0):
                raise wrong
            at += rows
        if at != length:
            raise wrong
