"""Where in a model an arm moves attention: KL of each layer's attention weights, from one exact pass."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lamina.basis.geometry import model_geometry
from lamina.engines.hf_settings import layer_scaling
from lamina.errors import UnsupportedModelError
from lamina.eval.arms import Arm
from lamina.eval.stage_rows import ReadRows, SeenRows, attend_to, exact_rows, read_rows, record_last_page
from lamina.eval.stages import check_recomputed
from lamina.pages import WindowConfig


def kl_by_layer(
    model: PreTrainedModel,
    arms: Sequence[Arm],
    opened: Mapping[str, Callable[[], Any]],
    ids: Tensor,
    window: WindowConfig,
    position_offset: int = 0,
) -> dict[str, list[float]]:
    """Mean KL of attention weights, layer by layer, of the last page's queries in a sequence.

    Each layer is given the rows of the exact run, so that its figure is its own doing. An arm with a controller writes
    them with the tiers that it has come to.

    Parameters
    ----------
    model : PreTrainedModel
        The model; its attention is left as it was.
    arms : sequence of Arm
        What to compare.
    opened : mapping
        Arm's name -> what makes its empty cache.
    ids : Tensor
        int64 ``[1, T]``.
    window : WindowConfig
        Exact windows.
    position_offset : int
        Position of the first token.

    Returns
    -------
    dict
        Arm's name -> nats by layer, NaN for layers that are not packed; empty where attention has parts that are not
        recomputed here, such as capped logits.
    """
    geometry, before = model_geometry(model.config), model.config._attn_implementation
    scaling = layer_scaling(model, [layer.head_dim for layer in geometry.layers])
    seen = record_last_page(model, ids, position_offset)
    found = {}
    try:
        for i, rows in seen.items():
            check_recomputed(i, rows, scaling[i])
        for arm in arms:
            cache = opened[arm.name]()
            found[arm.name] = [
                _kl(seen[i], read_rows(arm, cache, i, seen[i], window), scaling[i]) if i in seen else float("nan")
                for i in range(geometry.n_layers)
            ]
    except UnsupportedModelError:
        return {}
    finally:
        model.set_attn_implementation(before)
    return found


def _kl(seen: SeenRows, read: ReadRows, scaling: float) -> float:
    exact, ours = (attend_to(seen.queries, rows, scaling).logits for rows in (exact_rows(seen), read))
    log_p, log_q = exact.log_softmax(-1), ours.log_softmax(-1)
    return float(torch.where(exact.isfinite(), log_p.exp() * (log_p - log_q), 0.0).sum(-1).mean().clamp(min=0))
