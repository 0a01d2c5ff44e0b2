"""One layer's attention recomputed: from the rows it saw, and from the same rows as an arm's cache returns them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lamina.attention.reading import K, V, noise_factors, read_pages
from lamina.basis.calibrate import capturing, forward_hidden
from lamina.basis.geometry import model_geometry
from lamina.codec import PAGE_TOKENS
from lamina.eval.arms import Arm, ExactArm
from lamina.eval.simulate import SimulatedLayer
from lamina.pages import WindowConfig
from lamina.pages.table import ROWS, START, TIER


@dataclass(frozen=True)
class SeenRows:
    """What attention of one layer saw in an exact pass, after RoPE, on the CPU.

    Attributes
    ----------
    queries : Tensor
        ``[Hq, n, D]``, of the last page's tokens.
    keys, values : Tensor
        ``[H, T, D]``, of all tokens.
    output : Tensor
        ``[Hq, n, D]``: the model's own attention output.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    output: Tensor


@dataclass(frozen=True)
class ReadRows:
    """Rows as the last page's queries read them, float64, in the engine's basis.

    Attributes
    ----------
    keys, values : Tensor
        ``[H, T, D]``.
    coded : Tensor
        bool ``[T]``: whether they come from codes.
    noise : Tensor
        ``[H, T]``: the mass correction in units of half a packed query's square; 0 for exact rows.
    q_forward : Tensor
        ``[H, D, D]``: what takes a query into the packed basis.
    """

    keys: Tensor
    values: Tensor
    coded: Tensor
    noise: Tensor
    q_forward: Tensor


@dataclass(frozen=True)
class Attention:
    """Logits ``[H, g, n, T]``, minus infinity where a query does not look, and output ``[H, g, n, D]``, float64."""

    logits: Tensor
    output: Tensor

    def centred(self) -> Tensor:
        """Logits less each query's mean, 0 where it does not look: a constant leaves attention as it is."""
        seen = self.logits.isfinite()
        x = self.logits.masked_fill(~seen, 0.0)
        return (x - x.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)).masked_fill(~seen, 0.0)


class _Recorder:
    """Stands where calibration's accumulator stands, and keeps rows instead of moments."""

    def __init__(self, queries: int) -> None:
        self.queries = queries
        self.rows: Any = None

    def add_queries(self, q_bhtd: Tensor, o_bthd: Tensor) -> None:
        """Layers that share another's keys are not recorded."""

    def update(self, q_bhtd: Tensor, k_bhtd: Tensor, v_bhtd: Tensor, o_bthd: Tensor) -> None:
        q, o = q_bhtd[0, :, -self.queries :], o_bthd[0, -self.queries :].transpose(0, 1)
        self.rows = SeenRows(q.cpu(), k_bhtd[0].cpu(), v_bhtd[0].cpu(), o.cpu())


def last_page(tokens: int) -> int:
    """Tokens of the last page, whole or not."""
    return (tokens - 1) % PAGE_TOKENS + 1


def record_last_page(model: PreTrainedModel, ids: Tensor, position_offset: int = 0) -> dict[int, SeenRows]:
    """What attention of each packed layer saw in one exact pass over int64 ``[1, T]``."""
    recorders: dict[int, Any] = {i: _Recorder(last_page(ids.shape[1])) for i in model_geometry(model.config).packed}
    with torch.no_grad(), capturing(model, recorders) as collect, collect():
        forward_hidden(model, ids.to(model.device), position_offset)
    return {i: recorder.rows for i, recorder in recorders.items()}


def read_rows(arm: Arm, cache: Any, index: int, rows: SeenRows, window: WindowConfig) -> ReadRows:
    """Fill layer ``index`` of an arm's empty cache, and read it back.

    A page is exact by its position alone (Lamina SPEC 4), so all queries of one page read the same rows from codes.
    """
    exact_k, exact_v = rows.keys.double(), rows.values.double()
    heads, length, dim = exact_k.shape
    plain = torch.eye(dim, dtype=torch.float64).expand(heads, -1, -1)
    none = torch.zeros(heads, length, dtype=torch.float64)
    if isinstance(arm, ExactArm):
        k, v = (x.bfloat16().double() for x in (rows.keys, rows.values))
        return ReadRows(k, v, torch.ones(length, dtype=torch.bool), none, plain)
    layer = cache.layers[index]
    layer.lazy_initialization(rows.keys, rows.values)
    layer.store.append(rows.keys[None], rows.values[None])
    position = torch.tensor([[length - 1]])
    coded = torch.zeros(length, dtype=torch.bool)
    if isinstance(layer, SimulatedLayer):
        kept = layer.store.sequences[0]
        k, v = (x.double() for x in kept.coded)
        coded[: k.shape[1]] = ~kept.exactly(position, window)[0]
        return ReadRows(_mixed(k, exact_k, coded), _mixed(v, exact_v, coded), coded, none, plain)
    view, basis = layer.store.view(), layer.basis
    ids = view.page_ids[0].long()
    closed = ids[view.table[ids, TIER] > 0]
    for start, n in view.table[closed][:, [START, ROWS]].tolist():
        coded[start : start + n] = window.sink <= start < window.exact_from(length - 1)
    q_forward = basis.q_forward.double()
    k, step = read_pages(view, closed, K, torch.float64)
    v, _ = read_pages(view, closed, V, torch.float64)
    k, v = (x.transpose(0, 1).flatten(1, 2) for x in (k, v))
    v = v @ basis.v_back.double().mT + basis.mean_v.double()[:, None]
    noise = (noise_factors(view, closed, basis)[..., None].double() * step.double() ** 2).transpose(0, 1).flatten(1)
    none[:, : noise.shape[1]] = noise
    return ReadRows(
        _mixed(k @ q_forward.mT, exact_k, coded), _mixed(v, exact_v, coded), coded,
        torch.where(coded, none, 0.0), q_forward,
    )  # fmt: skip


def exact_rows(rows: SeenRows) -> ReadRows:
    """The rows as they came."""
    heads, length, dim = rows.keys.shape
    plain = torch.eye(dim, dtype=torch.float64).expand(heads, -1, -1)
    nothing = torch.zeros(length, dtype=torch.bool)
    return ReadRows(rows.keys.double(), rows.values.double(), nothing, torch.zeros(heads, length).double(), plain)


def attend_to(queries: Tensor, rows: ReadRows, scaling: float) -> Attention:
    """Causal attention of the last queries ``[Hq, n, D]`` to rows as they are read."""
    heads, length, _ = rows.keys.shape
    n = queries.shape[1]
    q = queries.double().unflatten(0, (heads, -1)) * scaling
    energy = (q @ rows.q_forward[:, None]).square().sum(-1, keepdim=True) / 2
    logits = q @ rows.keys[:, None].mT - energy * rows.noise[:, None, None]
    unseen = torch.arange(length) > torch.arange(length - n, length)[:, None]
    logits = logits.masked_fill(unseen, float("-inf"))
    return Attention(logits, logits.softmax(-1) @ rows.values[:, None])


def _mixed(read: Tensor, exact: Tensor, coded: Tensor) -> Tensor:
    """Rows from codes ``[H, m, D]`` where they are read, those that came elsewhere."""
    padded = torch.nn.functional.pad(read, (0, 0, 0, exact.shape[1] - read.shape[1]))
    return torch.where(coded[:, None], padded, exact)
