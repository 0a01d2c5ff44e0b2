"""Fold V's basis into a model's weights, so that the engine itself produces values in that basis (Lamina SPEC 3)."""

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lamina.basis.calibrate import forward_hidden
from lamina.basis.geometry import model_geometry
from lamina.basis.profile import LayerProfile, Profile
from lamina.errors import ProfileError, UnsupportedModelError

PROBE_TOKENS = 32
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def absorb_value_basis(model: PreTrainedModel, profile: Profile) -> Profile:
    """Fold R into every value projection and R' into every output projection, in place.

    Values that the engine stores, exact ones included, are then in the packed basis already, and no output needs to be
    turned back. Keys cannot be absorbed: RoPE stands between.

    Parameters
    ----------
    model : PreTrainedModel
        With floating-point weights and separate ``v_proj`` and ``o_proj`` modules; changed in place.
    profile : Profile
        The model's profile.

    Returns
    -------
    Profile
        To be used with the changed model: R = I, and means in the new basis.

    Raises
    ------
    ProfileError
        If the profile is for another model, or its basis was absorbed before.
    UnsupportedModelError
        If the projections cannot be found, are not floating point, or the model's output changes; the model is then
        left as it was.

    Examples
    --------
    >>> from lamina import LaminaCache, Profile, absorb_value_basis
    >>> profile = absorb_value_basis(model, Profile.load("model.profile"))
    >>> profile.absorbed
    True
    >>> cache = LaminaCache(model, profile)
    """
    geometry = model_geometry(model.config)
    profile.check_model(geometry)
    if profile.absorbed or getattr(model.config, "lamina_absorbed", False):
        raise ProfileError("V's basis was folded into this model before; load the model and its profile afresh")
    if geometry.shares_kv:
        raise UnsupportedModelError("layers share keys and values, so V's basis cannot be folded into one of them")
    modules = _attention_modules(model, list(geometry.packed))
    ids = torch.arange(PROBE_TOKENS, device=model.device)[None] % model.config.get_text_config(decoder=True).vocab_size
    saved = [[p.detach().clone() for p in _parameters(m)] for m in modules]
    with torch.no_grad():
        before = forward_hidden(model, ids, 0).float()
        for module, layer in zip(modules, profile.packed.values()):
            _fold(module, layer.transform.v_forward)
        change = float((forward_hidden(model, ids, 0).float() - before).norm() / before.norm())
        limit = TOLERANCE.get(modules[0].v_proj.weight.dtype, 5e-2)
        if not change < limit:
            for module, old in zip(modules, saved):
                for parameter, value in zip(_parameters(module), old):
                    parameter.copy_(value)
            raise UnsupportedModelError(
                f"folding V's basis changes the model's output by {change:.2g} (limit {limit}): something stands "
                "between its value projection and its attention, or between attention and output projection"
            )
    model.config.lamina_absorbed = True
    return dataclasses.replace(profile, layers=[layer and _absorbed(layer) for layer in profile.layers], absorbed=True)


def _absorbed(layer: LayerProfile) -> LayerProfile:
    transform = copy.copy(layer.transform)
    basis = transform.v_forward
    transform.mean_v = (transform.mean_v.double()[:, None] @ basis.double())[:, 0].float()
    transform.v_forward = torch.eye(basis.shape[-1]).expand_as(basis).contiguous()
    return dataclasses.replace(layer, transform=transform, moments=None)


def _attention_modules(model: PreTrainedModel, layers: list[int]) -> list[Any]:
    found: dict[int, Any] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and hasattr(module, "v_proj") and hasattr(module, "o_proj"):
            found[index] = module
    if not set(layers) <= set(found):
        raise UnsupportedModelError(f"{type(model).__name__} has no separate v_proj and o_proj in every layer")
    for i in layers:
        module = found[i]
        if not module.v_proj.weight.is_floating_point():
            raise UnsupportedModelError(f"layer {i}: v_proj is quantised; fold V's basis before quantising the weights")
    return [found[i] for i in layers]


def _parameters(module: Any) -> list[Tensor]:
    bias = module.v_proj.bias
    return [module.v_proj.weight, module.o_proj.weight, *([bias] if bias is not None else [])]


def _fold(module: Any, basis: Tensor) -> None:
    """v_proj rows become v R, o_proj columns undo it; ``basis`` is ``[H, D, D]``."""
    n_kv, dim, _ = basis.shape
    v, o = module.v_proj, module.o_proj
    r = basis.double().to(v.weight.device)
    v.weight.copy_((r.mT @ v.weight.double().view(n_kv, dim, -1)).reshape(v.weight.shape))
    if v.bias is not None:
        v.bias.copy_((v.bias.double().view(n_kv, 1, dim) @ r).reshape(v.bias.shape))
    columns = o.weight.double().view(o.weight.shape[0], n_kv, -1, dim)
    o.weight.copy_(torch.einsum("ehgd,hdc->ehgc", columns, r).reshape(o.weight.shape))
