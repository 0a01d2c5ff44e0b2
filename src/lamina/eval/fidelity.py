"""Fidelity: how far each arm's next-token distributions are from the exact run's."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lamina.basis.geometry import model_geometry
from lamina.basis.profile import Profile
from lamina.codec import PAGE_TOKENS
from lamina.engines.hf import ATTENTION, cache_kwarg
from lamina.errors import ConfigError, DataError
from lamina.eval.arms import Arm
from lamina.eval.layer_kl import kl_by_layer
from lamina.pages import WindowConfig

STRETCHES = 32
"""Most pieces of a sequence that the mean KL is given for."""


@dataclass
class ArmResult:
    """Figures of one arm.

    Attributes
    ----------
    name : str
        The arm.
    bits_history, bits_at_context : float
        Bits per element of packed tokens, and of everything at the end of a sequence.
    kl_mean, kl_median, kl_p99 : float
        KL divergence in nats from the exact run's next-token distribution, over all tokens.
    top1 : float
        Share of tokens whose most likely next token is the exact run's.
    ppl : float
        Perplexity of the text.
    kv_bytes, kv_bytes_bf16 : int
        Bytes of the cache at the end of a sequence, and with the packed layers' rows in bfloat16; layers that stay
        with transformers count alike in both.
    simulated : bool
        Whether the arm was simulated instead of stored.
    tier_mean : float
        Bits that rows were written with, scales not counted, averaged over K and V at the ends of all sequences; NaN
        where no page was full.
    kl_by_position : list of (int, float)
        First position of a stretch of a sequence and the mean KL in it; at most 32 stretches of equal length.
    kl_by_layer : list of float
        Mean KL of each layer's attention weights from exact ones, see :func:`kl_by_layer`; empty where it cannot be
        told.
    """

    name: str
    bits_history: float
    bits_at_context: float
    kl_mean: float
    kl_median: float
    kl_p99: float
    top1: float
    ppl: float
    kv_bytes: int
    kv_bytes_bf16: int
    tier_mean: float
    simulated: bool = False
    kl_by_position: list[tuple[int, float]] = field(default_factory=list)
    kl_by_layer: list[float] = field(default_factory=list)


class _Tally:
    def __init__(self) -> None:
        self.kl: list[Tensor] = []
        self.starts: list[int] = []
        self.same = self.tokens = self.scored = 0
        self.nll = 0.0
        self.bits: dict[str, float] = {}
        self.kv_bytes = 0
        self.tiers: list[float] = []

    def add(self, start: int, logits: Tensor, exact: Tensor, targets: Tensor) -> None:
        """Score logits ``[T, V]`` from ``start`` on against the exact run's; ``targets``: next tokens that exist."""
        self.starts.append(start)
        log_q, log_p = logits.float().log_softmax(-1), exact.float().log_softmax(-1)
        self.kl.append((log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0).cpu())
        self.same += int((logits.argmax(-1) == exact.argmax(-1)).sum())
        self.tokens += len(logits)
        self.nll -= float(log_q[: len(targets)].gather(-1, targets[:, None]).sum())
        self.scored += len(targets)

    def by_position(self) -> list[tuple[int, float]]:
        """Mean KL by stretches of whole pages."""
        chunks = max(self.starts) // PAGE_TOKENS + 1
        length = PAGE_TOKENS * -(-chunks // STRETCHES)
        found: dict[int, list[Tensor]] = {}
        for start, kl in zip(self.starts, self.kl):
            found.setdefault(start // length * length, []).append(kl)
        return [(start, float(torch.cat(kl).mean())) for start, kl in sorted(found.items())]


def measure_fidelity(
    model: PreTrainedModel,
    profile: Profile,
    arms: Sequence[Arm],
    sequences: Iterable[Tensor],
    *,
    position_offset: int = 0,
    window: WindowConfig | None = None,
    by_layer: bool = False,
    progress: Callable[[int], Any] | None = None,
    on_kl: Callable[[str, int, Tensor], Any] | None = None,
) -> list[ArmResult]:
    """Run text through every arm in lockstep with the exact run.

    All arms are fed 64 tokens at a time, so that every position sees what decoding would see.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    profile : Profile
        Its profile, with moments if an arm needs another transform.
    arms : list of Arm
        What to compare.
    sequences : iterable of Tensor
        int64 ``[1, T]``.
    position_offset : int
        Position of the first token.
    window : WindowConfig
        Exact windows.
    by_layer : bool
        Also tell KL by layer, on the first sequence.
    progress : callable
        Called with the number of tokens done, after each chunk.
    on_kl : callable
        Called with an arm's name, the position in the sequence, and the KL of every token of a chunk.
    """
    geometry = model_geometry(model.config)
    profile.check_model(geometry)
    window = window or WindowConfig()
    opened = {arm.name: arm.open(model, arm.profile(profile), window) for arm in arms}
    tallies = {arm.name: _Tally() for arm in arms}
    before = model.config._attn_implementation
    done = length = host_bytes = 0
    layers: dict[str, list[float]] = {}
    try:
        with torch.no_grad():
            for ids in sequences:
                length = ids.shape[1]
                if position_offset < 0 or position_offset + length > geometry.max_positions:
                    raise ConfigError(
                        f"position offset {position_offset} plus {length} tokens is outside the model's "
                        f"{geometry.max_positions} positions; use at most {geometry.max_positions - length}"
                    )
                model.set_attn_implementation(ATTENTION)
                exact = DynamicCache(config=model.config)
                caches = {name: new() for name, new in opened.items()}
                for cache in caches.values():
                    # A controller takes a chunk for as many decode steps.
                    if getattr(cache, "control", None) is not None:
                        cache.control.decode_tokens = PAGE_TOKENS
                for start in range(0, length, PAGE_TOKENS):
                    chunk = ids[:, start : start + PAGE_TOKENS].to(model.device)
                    targets = ids[0, start + 1 : start + PAGE_TOKENS + 1].to(model.device)
                    truth = _forward(model, chunk, exact, position_offset + start)
                    for name, cache in caches.items():
                        tallies[name].add(start, _forward(model, chunk, cache, position_offset + start), truth, targets)
                        if on_kl is not None:
                            on_kl(name, start, tallies[name].kl[-1])
                    done += chunk.shape[1]
                    if progress is not None:
                        progress(done)
                for name, cache in caches.items():
                    tallies[name].bits = cache.bits()
                    tallies[name].kv_bytes = sum(cache.memory().values())
                    tallies[name].tiers.append(cache.average_tier)
                    host_bytes = cache.memory().get("host_layers", host_bytes)
                if by_layer and not layers:
                    layers = kl_by_layer(model, arms, opened, ids, window, position_offset)
    finally:
        model.set_attn_implementation(before)
    if not done:
        raise DataError("the text is shorter than one sequence; use a smaller --seq-len or more text")
    bf16 = 2 * geometry.elements(length) + host_bytes
    return [_result(arm, tallies[arm.name], bf16, layers.get(arm.name, [])) for arm in arms]


def as_json(model: str, text: str, tokens: int, results: list[ArmResult]) -> dict[str, Any]:
    """The document that ``lamina fidelity --json`` writes."""
    return {"model": model, "text": text, "tokens": tokens, "arms": [asdict(r) for r in results]}


def _forward(model: PreTrainedModel, ids: Tensor, cache: Any, position: int) -> Tensor:
    positions = torch.arange(position, position + ids.shape[1], device=ids.device)[None]
    return model(input_ids=ids, position_ids=positions, use_cache=True, **cache_kwarg(model, cache)).logits[0]


def _result(arm: Arm, tally: _Tally, bf16: int, layers: list[float]) -> ArmResult:
    kl = torch.cat(tally.kl)
    return ArmResult(
        name=arm.name,
        bits_history=tally.bits["history"],
        bits_at_context=tally.bits["context"],
        kl_mean=float(kl.mean()),
        kl_median=float(kl.median()),
        kl_p99=float(kl.quantile(0.99)),
        top1=tally.same / tally.tokens,
        ppl=math.exp(tally.nll / max(tally.scored, 1)),
        kv_bytes=tally.kv_bytes,
        kv_bytes_bf16=bf16,
        simulated=arm.simulated,
        tier_mean=sum(tally.tiers) / len(tally.tiers),
        kl_by_position=tally.by_position(),
        kl_by_layer=layers,
    )
