"""One streaming pass over text that turns a model into a profile (Lamina SPEC 2)."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from lamina import __version__
from lamina.basis.encoder import measure_kappa
from lamina.basis.geometry import ModelGeometry, model_geometry
from lamina.basis.host_attention import host_attention
from lamina.basis.moments import MomentAccumulator
from lamina.basis.profile import LayerProfile, Profile, energies
from lamina.basis.transforms import TransformName, make_transform
from lamina.codec import CodecConfig
from lamina.codec.page import check_tier
from lamina.errors import ConfigError, DataError, UnsupportedModelError

CAPTURE = "lamina_capture"
OWNER = "lamina_owner"
BACKEND = "_supports_attention_backend"
MAX_CONTEXT = 131072
PROBE_TOKENS = 256
OFFSET_TOLERANCE = 0.05


@dataclass(frozen=True)
class CalibrationConfig:
    """Settings of a calibration run.

    Attributes
    ----------
    transform : str
        Basis of the profile.
    skip : int
        First tokens of each sequence that enter no statistic.
    max_context : int or None
        Largest position seen; None means the model's maximum, at most 131072.
    reservoir_pages : int
        Pages a layer kept to measure the codec's error on.
    tiers : (int, int)
        Initial bits of K and V, for every layer.
    seed : int
        Seed of the position offsets and of the reservoir.
    """

    transform: str = "balanced"
    skip: int = 64
    max_context: int | None = None
    reservoir_pages: int = 8
    tiers: tuple[int, int] = (2, 2)
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        if self.transform not in set(TransformName):
            raise ConfigError(f"unknown transform {self.transform!r}; choose one of {', '.join(TransformName)}")
        if self.skip < 0 or self.reservoir_pages < 1:
            raise ConfigError(f"skip={self.skip} and reservoir_pages={self.reservoir_pages} must be at least 0 and 1")
        for side, bits in zip("KV", self.tiers, strict=True):
            check_tier(bits, f"the initial {side} tier")
        if self.max_context is not None and self.max_context < 1:
            raise ConfigError(f"max_context={self.max_context} must be positive")


def calibrate(
    model: PreTrainedModel,
    sequences: Iterable[Tensor],
    config: CalibrationConfig | None = None,
    *,
    model_id: str | None = None,
    data_digest: str = "",
    progress: Callable[[int], Any] | None = None,
) -> Profile:
    """Calibrate a model.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder-only model; it is left as it was.
    sequences : iterable of Tensor
        int64 ``[B, T]`` token sequences without padding.
    config : CalibrationConfig
        Settings.
    model_id, data_digest : str
        Recorded in the profile.
    progress : callable
        Called with the number of tokens after each sequence.

    Returns
    -------
    Profile
        With moments, so that other transforms can be derived.

    Raises
    ------
    UnsupportedModelError
        If the model cannot be served.
    DataError
        If the text is too short for one whole page a sequence.

    Examples
    --------
    >>> from pathlib import Path
    >>> from lamina import CalibrationConfig, calibrate
    >>> ids = tokenizer(Path("mine.jsonl").read_text(), return_tensors="pt").input_ids[:, :2048]
    >>> profile = calibrate(model, ids.split(512, dim=1), CalibrationConfig(tiers=(4, 2)), model_id="mine")
    >>> profile.info["tokens"]
    2048
    >>> profile.save("mine.profile")
    """
    config = config or CalibrationConfig()
    geometry = model_geometry(model.config)
    check_attention_interface(model, geometry)
    generator = torch.Generator().manual_seed(config.seed)
    stats = {i: MomentAccumulator(config.skip, config.reservoir_pages, generator) for i in geometry.packed}
    limit = min(geometry.max_positions, config.max_context or MAX_CONTEXT)
    tokens = longest = 0
    random_offsets: bool | None = None
    with torch.no_grad(), capturing(model, stats) as collect:
        for ids in sequences:
            ids = ids.to(model.device)
            if ids.shape[1] > limit:
                raise ConfigError(
                    f"a sequence of {ids.shape[1]} tokens exceeds the largest position, {limit}; use shorter sequences "
                    "or a larger max_context"
                )
            longest = max(longest, ids.shape[1])
            if random_offsets is None:
                random_offsets = _positions_are_relative(model, ids[:1, :PROBE_TOKENS], limit)
            room = limit - ids.shape[1] if random_offsets else 0
            offset = int(torch.randint(room + 1, (1,), generator=generator)) if room > 0 else 0
            with collect():
                forward_hidden(model, ids, offset)
            tokens += ids.numel()
            if progress is not None:
                progress(tokens)
    _check_layers(geometry, stats, longest)
    if not any(s.n_paged for s in stats.values()):
        raise DataError(
            f"{tokens} tokens of text hold no whole page after the first {config.skip} tokens of a sequence; "
            "give more text or longer sequences"
        )
    return Profile(
        layers=[_layer_profile(stats[i], config) if i in stats else None for i in range(geometry.n_layers)],
        model_id=model_id or getattr(model.config, "_name_or_path", "") or "unnamed",
        config_hash=geometry.config_hash,
        transform=str(config.transform),
        tiers=[config.tiers] * geometry.n_layers,
        info={
            "tokens": tokens,
            "data_digest": data_digest,
            "max_position": limit if random_offsets else longest,
            "random_positions": bool(random_offsets),
            "skip": config.skip,
            "seed": config.seed,
            "package_version": __version__,
        },
    )


def _check_layers(geometry: ModelGeometry, stats: dict[int, MomentAccumulator], longest: int) -> None:
    """Raise UnsupportedModelError unless every layer attended to rows of the shape that its configuration tells of."""
    missing = [i for i, s in stats.items() if not s.n_q and longest > s.skip]
    if missing:
        raise UnsupportedModelError(f"layers {missing} did not go through transformers' attention interface")
    for i, s in stats.items():
        if not s.n_q:
            continue
        (heads, keys, _), values, told = s.sums["c_q"].shape, s.sums["c_v"].shape[-1], geometry.layers[i]
        if (heads, keys, values) != (told.n_kv_heads, told.head_dim, told.head_dim):
            raise UnsupportedModelError(
                f"layer {i} attends to keys of {heads} KV heads with {keys} channels and values with {values}; its "
                f"configuration tells of {told.n_kv_heads} KV heads with {told.head_dim}"
            )


def _layer_profile(stats: MomentAccumulator, config: CalibrationConfig) -> LayerProfile:
    moments = stats.result()
    moments = type(moments)(**{n: getattr(moments, n).cpu() for n in moments.names()})
    transform = make_transform(config.transform, moments)
    k_pages, _ = stats.reservoir()
    kappa = measure_kappa(k_pages @ transform.k_forward.float(), CodecConfig())
    q_energy, v_energy = energies(transform, moments)
    return LayerProfile(transform.float(), kappa, q_energy, v_energy, moments)


def decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """The text decoder of a model, without its head."""
    body = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    # Some models answer with themselves or with their head.
    return body if body is not model and isinstance(body, PreTrainedModel) else getattr(model, "model", model)


def forward_hidden(model: PreTrainedModel, ids: Tensor, offset: int) -> Tensor:
    """Final hidden states ``[B, T, hidden]`` of a run whose positions start at ``offset``."""
    positions = torch.arange(offset, offset + ids.shape[1], device=ids.device)[None].expand(ids.shape[0], -1)
    return decoder_of(model)(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state


def _positions_are_relative(model: PreTrainedModel, ids: Tensor, limit: int) -> bool:
    """Whether hidden states are the same at position 0 and at the end of the range, up to rounding."""
    far = limit - ids.shape[1]
    if far <= 0:
        return False
    near_state, far_state = forward_hidden(model, ids, 0).float(), forward_hidden(model, ids, far).float()
    return float((near_state - far_state).norm() / near_state.norm()) < OFFSET_TOLERANCE


@contextmanager
def capturing(model: PreTrainedModel, stats: dict[int, MomentAccumulator]) -> Iterator[Callable[[], Any]]:
    """Route the model's attention through a function that can feed ``stats``; restored on exit.

    Yields a context manager factory: statistics are taken only inside it.
    """
    before = model.config._attn_implementation
    modules: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int)]

    @contextmanager
    def collect() -> Iterator[None]:
        for m in modules:
            m.lamina_stats = stats.get(m.layer_idx)
        try:
            yield
        finally:
            for m in modules:
                del m.lamina_stats

    try:
        model.set_attn_implementation(CAPTURE)
        yield collect
    finally:
        model.set_attn_implementation(before)


def _capture_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    output, weights = host_attention(module, query, key, value, attention_mask, **kwargs)
    # Layers that share keys hand on the very tensor, so it can tell whose statistics their queries belong to.
    owner = getattr(key, OWNER, None)
    stats = getattr(module, "lamina_stats", None)
    if owner is not None and owner is stats:
        raise UnsupportedModelError(
            f"layer {module.layer_idx} attends more than once to the same keys, so its values are not the stored ones"
        )
    if owner is not None:
        owner.add_queries(query, output)
    elif stats is not None:
        stats.update(query, key, value, output)
        setattr(key, OWNER, stats)
    return output, weights


def _can_exchange_attention(model: PreTrainedModel) -> bool:
    """What the model's class says; transformers' own look at its source where it says nothing, as hybrid models do."""
    said = [vars(c)[BACKEND] for c in type(model).__mro__ if c is not PreTrainedModel and BACKEND in vars(c)]
    return bool(said[0]) if said else model._can_set_attn_implementation()


def check_attention_interface(model: PreTrainedModel, geometry: ModelGeometry) -> None:
    """Raise UnsupportedModelError unless the model's attention can be exchanged."""
    if not _can_exchange_attention(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} does not use transformers' attention interface, so its {geometry.n_layers} "
            "layers cannot read a packed cache"
        )
    for module in decoder_of(model).modules():
        if isinstance(getattr(module, "layer_idx", None), int) and getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(
                f"{type(model).__name__} looks ahead in layer {module.layer_idx}; a cache needs causal attention"
            )


AttentionInterface.register(CAPTURE, _capture_attention)
AttentionMaskInterface.register(CAPTURE, sdpa_mask)
