"""A prompt read once, with exact attention, and given to the cache of every arm."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lamina.basis.calibrate import decoder_of
from lamina.engines.hf import ATTENTION, LaminaCache, cache_kwarg
from lamina.eval.bf16 import Bf16Cache


class ReadPrompt:
    """A prompt's rows but those of its last token, which every arm reads from its own cache.

    A cache that is given a whole prompt at once attends to it exactly while it stores it, so arms differ from the
    first token on that is read from the cache, and need not read the prompt one by one.

    Parameters
    ----------
    model : PreTrainedModel
        What reads; its attention becomes Lamina's, which without a Lamina cache is the model's own.
    ids : Tensor
        int64 ``[1, n]``.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self.ids = ids
        model.set_attn_implementation(ATTENTION)
        decoder: Any = decoder_of(model)
        self.rows = DynamicCache(config=model.config.get_text_config(decoder=True))
        if ids.shape[1] > 1:
            with torch.no_grad():
                decoder(input_ids=ids[:, :-1], use_cache=True, **cache_kwarg(decoder, self.rows))

    def fill(self, cache: Any) -> None:
        """Store the rows in an empty cache, as if the model had read the prompt with it."""
        if self.ids.shape[1] == 1:
            return
        if not isinstance(cache, LaminaCache | Bf16Cache):
            raise TypeError(f"{type(cache).__name__} is not the cache of an arm")
        packed = set(cache.geometry.packed)
        layers: list[Any] = self.rows.layers
        for i, read in enumerate(layers):
            if i not in packed:
                cache.layers[i] = deepcopy(read)
            elif isinstance(cache, Bf16Cache):
                cache.layers[i].update(read.keys, read.values)
            else:
                cache.layers[i].take(read.keys, read.values)
