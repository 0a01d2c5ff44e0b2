"""Attention over exact rows, as the model itself would compute it."""

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lamina.errors import UnsupportedModelError

TILE_QUERIES = 256


def host_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' sdpa attention; with capped logits or sink logits, which that lacks, in plain torch.

    Parameters
    ----------
    module : Module
        The attention layer.
    query, key, value : Tensor
        ``[B, Hq, T, D]`` and ``[B, H, S, D]``.
    attention_mask : Tensor or None
        ``[B, 1, T, S]``, boolean or additive; None for causal attention.
    scaling, dropout, softcap
        Factor on q.k, dropout of the weights, cap of the logits.
    s_aux : Tensor or None
        ``[Hq]`` sink logits.
    **kwargs
        Handed to sdpa attention.

    Returns
    -------
    Tensor
        ``[B, T, Hq, D]``, and None in place of weights.
    """
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if dropout or kwargs.get("position_bias") is not None:
        raise UnsupportedModelError("capped or sink logits together with dropout or a position bias are not supported")
    batch, n_q, tokens, dim = query.shape
    n_kv, length = key.shape[1], key.shape[2]
    q = query.float().unflatten(1, (n_kv, -1)) * (dim**-0.5 if scaling is None else scaling)
    k, v = key.float()[:, :, None], value.float()[:, :, None]
    out = torch.empty(batch, tokens, n_q, v.shape[-1], dtype=query.dtype, device=query.device)
    columns = torch.arange(length, device=query.device)
    for start in range(0, tokens, TILE_QUERIES):
        end = min(tokens, start + TILE_QUERIES)
        x = q[:, :, :, start:end] @ k.mT
        if softcap is not None:
            x = softcap * (x / softcap).tanh()
        if attention_mask is None:
            rows = torch.arange(start, end, device=query.device) + length - tokens
            x = x.masked_fill(columns > rows[:, None], torch.finfo(x.dtype).min)
        else:
            mask = attention_mask[:, :, None, start:end, :length]
            x = x.masked_fill(~mask, torch.finfo(x.dtype).min) if mask.dtype == torch.bool else x + mask
        if s_aux is not None:
            sink = s_aux.float().view(1, n_kv, -1, 1, 1).expand(*x.shape[:-1], 1)
            x = torch.cat([x, sink], -1)
        p = x.softmax(-1)[..., :length]
        out[:, start:end] = (p @ v).flatten(1, 2).transpose(1, 2).to(query.dtype)
    return out, None
