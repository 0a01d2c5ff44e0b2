"""Prompts whose rows are there without having been computed, so that decoding over long ones can be timed in seconds.

Blocks are filled with random rows once: normal numbers, bytes of an FP8 cache that are finite, or codes of normal rows.
Every prompt then finds as many of them as it has whole blocks, each its own, as if it had been answered before; what
vLLM's scheduler, Lamina's books and the kernels do from then on is what they do after a prompt that was computed.
"""

from typing import Any

import torch


def fill(worker: Any) -> None:
    """Fill a worker's cache."""
    state = getattr(worker, "lamina", None)
    if state is None:
        caches = worker.model_runner.kv_caches
        for cache in caches.values() if isinstance(caches, dict) else caches:
            if cache.is_floating_point() and cache.element_size() > 1:
                cache.normal_()
            else:
                cache.view(torch.uint8).random_(0, 64)
        return
    pages, block = state.pages, [1]
    pages.open(block, [0], [True], [False])
    pages.exact.normal_()
    pages.slabs.random_(0, 256)
    pages.flush()
    state.closer.now(block, [(2, 2)] * pages.n_layers)
    for records in pages.records:
        records.copy_(records[1:2].clone().expand_as(records))
    pages.close(block, [(2, 2)] * pages.n_layers)
    pages.release(block, [])


def lay_out(worker: Any, blocks: list[int]) -> None:
    """Have blocks be the pages of a prompt, with planes and exact rows as they are once it was computed."""
    state = getattr(worker, "lamina", None)
    if state is None:
        return
    starts = [64 * i for i in range(len(blocks))]
    recent = state.window.exact_from(64 * len(blocks))
    exact = [start < state.window.sink or start >= recent for start in starts]
    state.pages.open(blocks, starts, exact, [False] * len(blocks))
    state.pages.close(blocks, state._room(len(blocks)))
    state.pages.release(blocks, [])


def find_everything(llm: Any) -> None:
    """Have the scheduler of an engine with a prefix cache find all whole blocks of every prompt."""
    core = llm.llm_engine.engine_core.engine_core
    manager = core.scheduler.kv_cache_manager
    size, pool = core.vllm_config.cache_config.block_size, manager.block_pool

    def found(request: Any, max_cache_hit_length: int | None = None) -> tuple[Any, int, int]:
        n = (request.num_tokens - 1) // size
        # The last of the queue are the last that others are given.
        blocks = pool.free_block_queue.get_all_free_blocks()[-n:]
        if len(blocks) < n or n == 0:
            return manager.empty_kv_cache_blocks, 0, 0
        llm.collective_rpc(lay_out, args=([b.block_id for b in blocks],))
        return manager.create_kv_cache_blocks((blocks,)), n * size, 0

    manager.get_computed_blocks = found
