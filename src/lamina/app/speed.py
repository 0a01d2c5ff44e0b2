"""Decode speed of several caches, step by step in turn, so that a busy moment of the machine hits all of them alike."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lamina.app.loading import LoadedModel
from lamina.engines.hf import cache_kwarg

UNTIMED_STEPS = 2
"""First decode steps of a cache that do not count: they compile kernels and touch new memory."""


def decode_speeds(
    loaded: LoadedModel,
    ids: Tensor,
    caches: Mapping[str, Any],
    steps: int,
    progress: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """Tokens per second of each cache after a prompt: one over its median step.

    Parameters
    ----------
    loaded
        The model; the most likely token is taken at each step.
    ids
        int64 ``[1, T]``, the prompt.
    caches
        Empty caches by name; each then holds the prompt and ``steps + UNTIMED_STEPS`` tokens.
    steps
        Steps that count.
    progress
        Called with the number of tokens done, ``len(caches) * (steps + UNTIMED_STEPS + 1)`` in the end.
    """
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    tokens = dict.fromkeys(caches, ids.to(loaded.model.device))
    done = 0
    with torch.no_grad():
        for _ in range(1 + UNTIMED_STEPS + steps):
            for name, cache in caches.items():
                start = time.perf_counter()
                output = loaded.model(
                    input_ids=tokens[name], use_cache=True, logits_to_keep=1, **cache_kwarg(loaded.model, cache)
                )
                next_id = int(output.logits[0, -1].argmax())
                seconds[name].append(time.perf_counter() - start)
                tokens[name] = tokens[name].new_tensor([[next_id]])
                done += 1
                if progress is not None:
                    progress(done)
    return {name: 1 / median(times[1 + UNTIMED_STEPS :]) for name, times in seconds.items()}
