"""Where an arm's error arises: relative errors of cache, logits, attention output and hidden state, layer by layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lamina.basis.calibrate import decoder_of
from lamina.basis.geometry import model_geometry
from lamina.basis.profile import Profile
from lamina.codec import PAGE_TOKENS
from lamina.engines.hf import ATTENTION, cache_kwarg
from lamina.engines.hf_settings import layer_scaling
from lamina.errors import ConfigError, DataError, UnsupportedModelError
from lamina.eval.arms import Arm, EchoArm, LiveArm
from lamina.eval.stage_rows import ReadRows, SeenRows, attend_to, exact_rows, read_rows, record_last_page
from lamina.pages import WindowConfig

TOLERANCE = 0.02
"""Relative difference of recomputed attention from the model's own that rounding to 16 bits can explain."""


@dataclass(frozen=True)
class Stages:
    """Relative errors |x^ - x| / |x| of one layer; NaN where there is nothing to compare.

    Attributes
    ----------
    cache_k, cache_v : float
        Rows that the last page's queries read from codes, in the engine's basis.
    logits : float
        Attention logits of these queries over all they see, less each query's mean, with the mass correction.
    output : float
        Attention output of these queries.
    hidden : float
        Hidden state after the layer, in a run where all layers read the arm's cache.
    """

    cache_k: float
    cache_v: float
    logits: float
    output: float
    hidden: float


STAGES = tuple(f.name for f in fields(Stages))


@dataclass(frozen=True)
class ArmStages:
    """Errors of one arm, by layer; ``mean`` is over the layers that have a figure."""

    name: str
    simulated: bool
    layers: list[Stages]

    @property
    def mean(self) -> Stages:
        """Average over layers."""
        found = {name: [x for s in self.layers if (x := getattr(s, name)) == x] for name in STAGES}
        return Stages(**{name: sum(x) / len(x) if x else float("nan") for name, x in found.items()})


class _Sums:
    """Squares of an error and of what is exact."""

    def __init__(self) -> None:
        self.error = self.exact = 0.0

    def add(self, read: Tensor, exact: Tensor) -> None:
        self.error += float((read.double() - exact.double()).square().sum())
        self.exact += float(exact.double().square().sum())

    @property
    def relative(self) -> float:
        return float((self.error / self.exact) ** 0.5) if self.exact else float("nan")


def measure_stages(
    model: PreTrainedModel,
    profile: Profile,
    arms: Sequence[Arm],
    sequences: Sequence[Tensor],
    *,
    window: WindowConfig | None = None,
    progress: Callable[[int], Any] | None = None,
) -> list[ArmStages]:
    """Errors of every arm at every stage of every layer, at the last page's tokens of each sequence.

    The text is given (teacher-forced). Cache, logits and output are each layer's own doing: its rows are those of the
    exact run. The hidden state carries the errors of all layers up to it.

    Parameters
    ----------
    model : PreTrainedModel
        The model; its attention is left as it was.
    profile : Profile
        Its profile, with moments if an arm needs another transform.
    arms : sequence of Arm
        Arms with fixed tiers.
    sequences : sequence of Tensor
        int64 ``[1, T]``.
    window : WindowConfig
        Exact windows.
    progress : callable
        Called with the number of tokens done, each counted once an arm.

    Raises
    ------
    ConfigError
        For an arm that decides its tiers while running.
    UnsupportedModelError
        If attention has parts that are not recomputed here, such as capped logits.
    """
    for arm in arms:
        check_fixed(arm)
    if not sequences:
        raise DataError("there is no text to run; give a sequence")
    geometry, window, before = model_geometry(model.config), window or WindowConfig(), model.config._attn_implementation
    scaling = layer_scaling(model, [layer.head_dim for layer in geometry.layers])
    sums = {arm.name: [{name: _Sums() for name in STAGES} for _ in geometry.layers] for arm in arms}
    profiles = {arm.name: arm.profile(profile) for arm in arms}
    done = 0
    try:
        for ids in sequences:
            seen = record_last_page(model, ids)
            for i, rows in seen.items():
                check_recomputed(i, rows, scaling[i])
            model.set_attn_implementation(ATTENTION)
            exact = last_hidden_states(model, ids, DynamicCache(config=model.config))
            for arm in arms:
                cache = arm.cache(model, profiles[arm.name], window)
                for i, rows in seen.items():
                    _add_layer(sums[arm.name][i], rows, read_rows(arm, cache, i, rows, window), scaling[i])
                hidden = last_hidden_states(model, ids, arm.cache(model, profiles[arm.name], window))
                for layer, state, truth in zip(sums[arm.name], hidden, exact, strict=True):
                    layer["hidden"].add(state, truth)
                done += ids.numel()
                if progress is not None:
                    progress(done)
            model.set_attn_implementation(before)
    finally:
        model.set_attn_implementation(before)
    return [
        ArmStages(arm.name, arm.simulated, [Stages(**{n: s.relative for n, s in x.items()}) for x in sums[arm.name]])
        for arm in arms
    ]


def check_fixed(arm: Arm) -> None:
    """Raise ConfigError for an arm whose layers cannot be filled one by one."""
    if isinstance(arm, LiveArm | EchoArm):
        raise ConfigError(f"the arm {arm.name} decides its bits while it runs; the four stages need fixed ones")


def last_hidden_states(model: PreTrainedModel, ids: Tensor, cache: Any) -> list[Tensor]:
    """Hidden states ``[n, hidden]`` after each layer at the last page's tokens, fed page by page, on the CPU."""
    states: list[Tensor] = []

    def keep(_module: Any, _given: Any, output: Any) -> None:
        states.append((output[0] if isinstance(output, tuple) else output)[0].float().cpu())

    decoder: Any = decoder_of(model)
    hooks = [layer.register_forward_hook(keep) for layer in decoder_layers(model)]
    try:
        with torch.no_grad():
            for start in range(0, ids.shape[1], PAGE_TOKENS):
                states.clear()
                chunk = ids[:, start : start + PAGE_TOKENS].to(model.device)
                positions = torch.arange(start, start + chunk.shape[1], device=chunk.device)[None]
                decoder(input_ids=chunk, position_ids=positions, use_cache=True, **cache_kwarg(decoder, cache))
    finally:
        for hook in hooks:
            hook.remove()
    return states


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers of a model's decoder, in order."""
    n = model_geometry(model.config).n_layers
    for module in decoder_of(model).modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == n:
            return list(module)
    raise UnsupportedModelError(f"{type(model).__name__} has no list of its {n} layers to take hidden states from")


def _add_layer(sums: dict[str, _Sums], seen: SeenRows, read: ReadRows, scaling: float) -> None:
    """Add the stages that lie within one layer."""
    exact = attend_to(seen.queries, exact_rows(seen), scaling)
    ours = attend_to(seen.queries, read, scaling)
    sums["cache_k"].add(read.keys[:, read.coded], seen.keys[:, read.coded])
    sums["cache_v"].add(read.values[:, read.coded], seen.values[:, read.coded])
    sums["logits"].add(ours.centred(), exact.centred())
    sums["output"].add(ours.output, exact.output)


def check_recomputed(index: int, seen: SeenRows, scaling: float) -> None:
    """Raise UnsupportedModelError unless the attention recomputed from a layer's rows is the model's own."""
    found, own = attend_to(seen.queries, exact_rows(seen), scaling).output.flatten(0, 1), seen.output.double()
    error = float((found - own).norm() / own.norm().clamp(min=1e-30))
    if not error < TOLERANCE:
        raise UnsupportedModelError(
            f"layer {index}: attention recomputed from its rows differs from the model's by {error:.2g} of its size; "
            "models with capped logits or attention sinks have no four-stage view"
        )
