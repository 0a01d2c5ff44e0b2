"""How a worker's bytes for the KV cache are shared out."""

import math
from dataclasses import dataclass

from lamina.codec import PAGE_TOKENS
from lamina.codec.packing import slabs_beyond_base
from lamina.engines.vllm.config import AUTO
from lamina.engines.vllm.pages import BOOK_BYTES
from lamina.errors import ConfigError
from lamina.pages.config import WindowConfig
from lamina.pages.layout import RecordLayout


@dataclass(frozen=True)
class LayerShape:
    """One attention layer of this worker: its index in the model, KV heads, the first of them, and head dimension."""

    index: int
    n_heads: int
    first_head: int
    head_dim: int

    @property
    def layout(self) -> RecordLayout:
        """Records that fill whole blocks of vLLM, which count bytes a token."""
        return RecordLayout(self.n_heads, self.head_dim, align=PAGE_TOKENS)

    def exact_bytes(self, itemsize: int) -> int:
        """Bytes of a page's exact rows, of numbers of ``itemsize`` bytes."""
        return 8 * self.layout.slab_bytes * itemsize


@dataclass(frozen=True)
class Sizes:
    """How a worker's bytes for the KV cache are shared out.

    Attributes
    ----------
    blocks : int
        Blocks of vLLM.
    block_bytes : int
        Bytes of a block over all layers.
    book_bytes : int
        Bytes of tables a block, over all layers.
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
    book_bytes: int
    slabs: int
    slab_bytes: int
    exact_pages: int
    exact_bytes: int


def sizes(
    available: int, shapes: list[LayerShape], itemsize: int, tiers: list[tuple[int, int]], arena_gb: float | str,
    most_exact: int, least_bits: float = 2.0,
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
    least_bits : float
        Average tier that ``auto`` leaves room for at least, as for a controller that will decide on it.

    Raises
    ------
    ConfigError
        If that leaves no block.
    """
    slab_bytes = max(s.layout.slab_bytes for s in shapes)
    block = sum(s.layout.record_bytes for s in shapes)
    book = BOOK_BYTES * len(shapes)
    exact = sum(s.exact_bytes(itemsize) for s in shapes)
    # Planes beyond the base grow with the bits: none at 2, one at 4, three at 8.
    planes = max(slabs_beyond_base(b for pair in tiers for b in pair), math.ceil(len(shapes) * (least_bits - 2)))
    arena = 0 if arena_gb == AUTO else int(float(arena_gb) * 1e9)
    each = block + book + (planes * slab_bytes if arena_gb == AUTO else 0)
    # Fewer blocks than exact pages need no more exact pages than blocks.
    blocks = max((available - arena - most_exact * exact) // each, 0)
    if blocks < most_exact:
        blocks = min(max((available - arena) // (each + exact), 0), most_exact)
    if blocks < 2:
        raise ConfigError(
            f"{available / 1e9:.3g} GB for the KV cache hold no block beside {arena / 1e9:.3g} GB of arena and exact "
            "rows; give vLLM more memory, or lower arena_gb, max_num_seqs or max_num_batched_tokens"
        )
    slabs = blocks * planes if arena_gb == AUTO else arena // slab_bytes
    return Sizes(blocks, block, book, slabs, slab_bytes, min(most_exact, blocks), exact)


def exact_pages(window: WindowConfig, max_num_seqs: int, max_num_batched_tokens: int, decode_tokens: int = 1) -> int:
    """Exact pages that can be needed at a time: windows, open pages, and what a step adds before it lets go.

    ``decode_tokens``: those of a request that decodes, drafts included, which may go to two pages.
    """
    kept = request_pages(window) + (decode_tokens > 1)
    return max_num_seqs * kept + chunk_pages(max_num_batched_tokens)


def request_pages(window: WindowConfig) -> int:
    """Exact pages of a request: its windows and the open one."""
    return (window.sink + window.recent) // PAGE_TOKENS + 1


def chunk_pages(max_num_batched_tokens: int) -> int:
    """Exact pages that the prompts of a step may add before older ones are let go."""
    return max_num_batched_tokens // PAGE_TOKENS + 1
