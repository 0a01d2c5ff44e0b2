"""Attention drift layer by layer: where in a model an arm's packed reads move attention, from one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lamina.basis.calibrate import capturing, forward_hidden
from lamina.basis.geometry import model_geometry
from lamina.basis.profile import Profile
from lamina.eval.arms import Arm
from lamina.eval.drift import attention_drift
from lamina.pages import WindowConfig

QUERIES = 64


@dataclass(frozen=True)
class LayerRows:
    """What attention of one layer saw in a forward pass, after RoPE, on the CPU.

    Attributes
    ----------
    queries : Tensor
        ``[Hq, n, D]``, of the last n tokens.
    keys, values : Tensor
        ``[H, T, D]``, of all tokens.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor


class _Recorder:
    """Stands where calibration's accumulator stands, and keeps rows instead of moments."""

    def __init__(self, queries: int) -> None:
        self.queries = queries
        self.rows: LayerRows | None = None

    def add_queries(self, q_bhtd: Tensor, o_bthd: Tensor) -> None:
        """Layers that share another's keys are not recorded."""

    def update(self, q_bhtd: Tensor, k_bhtd: Tensor, v_bhtd: Tensor, o_bthd: Tensor) -> None:
        self.rows = LayerRows(q_bhtd[0, :, -self.queries :].cpu(), k_bhtd[0].cpu(), v_bhtd[0].cpu())


def record_rows(model: PreTrainedModel, ids: Tensor, queries: int = QUERIES) -> list[LayerRows | None]:
    """Rows of every layer in one exact pass over int64 ``[1, T]``; None for a layer that is not packed."""
    geometry = model_geometry(model.config)
    recorders: dict[int, Any] = {i: _Recorder(queries) for i in geometry.packed}
    with torch.no_grad(), capturing(model, recorders) as collect, collect():
        forward_hidden(model, ids.to(model.device), 0)
    return [recorders[i].rows if i in recorders else None for i in range(geometry.n_layers)]


def layer_drift(
    model: PreTrainedModel,
    profile: Profile,
    arm: Arm,
    rows: Sequence[LayerRows | None],
    window: WindowConfig | None = None,
) -> list[float]:
    """Mean KL of each layer's attention from exact attention, as an arm stored in packed pages reads it.

    Attention weights depend on keys alone, so two arms that differ in the bits of values have the same drift.

    Parameters
    ----------
    model : PreTrainedModel
        The model; its attention is left as it was.
    profile : Profile
        What :meth:`lamina.eval.arms.Arm.profile` of the arm returned.
    arm : Arm
        A packed arm.
    rows : sequence of LayerRows or None
        What :func:`record_rows` returned.
    window : WindowConfig
        Exact windows.

    Returns
    -------
    list of float
        Nats, averaged over query heads and recorded queries; NaN for a layer whose attention is not packed.
    """
    before = model.config._attn_implementation
    try:
        cache = arm.cache(model, profile, window or WindowConfig())
        return [
            float("nan") if seen is None else _drift(layer, seen)
            for layer, seen in zip(cache.layers, rows, strict=True)
        ]
    finally:
        model.set_attn_implementation(before)


def _drift(layer: Any, rows: LayerRows) -> float:
    """Fill a cache's layer, and compare what is read from it."""
    layer.lazy_initialization(rows.keys, rows.values)
    layer.store.append(rows.keys[None], rows.values[None])
    kl = attention_drift(rows.queries, rows.keys, layer.store.view(), layer.basis)
    return max(0.0, float(kl.mean()))
