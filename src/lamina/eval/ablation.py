"""Studies: arms that differ in one thing, measured on the same text against the same exact run (Lamina SPEC 7)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lamina.basis.hadamard import bit_reversal, flat_orthogonal
from lamina.basis.moments import Moments
from lamina.basis.profile import Profile, derive_layer
from lamina.basis.transforms import LayerTransform, sorted_eigh
from lamina.errors import ConfigError
from lamina.eval.arms import Arm
from lamina.eval.fidelity import ArmResult, measure_fidelity
from lamina.eval.grouped import GroupedCache
from lamina.pages import WindowConfig

RESAMPLES = 2000

K_MATRICES: dict[str, Callable[[Moments], Tensor]] = {"Q'Q": lambda m: m.c_q, "K'K": lambda m: m.c_k}
"""Whose eigenvectors U are for keys. K'K is about the mean of a page, which is what profiles keep."""

V_MATRICES: dict[str, Callable[[Moments], Tensor]] = {
    "weighted": lambda m: m.c_s_weighted,
    "softmax": lambda m: m.c_s_softmax,
    "V'V": lambda m: m.c_v + m.mean_v[:, :, None] * m.mean_v[:, None, :],
}
"""Whose eigenvectors U are for values; V'V is not centred."""

MIXES = ("U", "U H", "U H P")


@dataclass(frozen=True)
class Rotation:
    """An orthogonal basis in OSCAR's manner (arXiv 2605.17757), by its parts.

    Attributes
    ----------
    k, v : str
        Keys of ``K_MATRICES`` and ``V_MATRICES``.
    mix : str
        ``U``, ``U H`` (H a Hadamard matrix) or ``U H P`` (P the bit reversal).
    per_head : bool
        One basis a KV head, or as published one a layer.
    """

    k: str = "Q'Q"
    v: str = "weighted"
    mix: str = "U H P"
    per_head: bool = False

    def __post_init__(self) -> None:
        """Check every field."""
        for value, known in ((self.k, K_MATRICES), (self.v, V_MATRICES), (self.mix, MIXES)):
            if value not in known:
                raise ConfigError(f"unknown part {value!r} of a rotation; choose from {', '.join(known)}")

    def transform(self, moments: Moments) -> LayerTransform:
        """Bases of one layer in float64."""
        k, v = (self._basis(c) for c in (K_MATRICES[self.k](moments), V_MATRICES[self.v](moments)))
        return LayerTransform(k, k.clone(), v, torch.zeros_like(moments.mean_v))

    def profile(self, profile: Profile) -> Profile:
        """The profile with this rotation in every layer, without a measured noise for the mass correction."""
        layers: list[Any] = [None] * len(profile.layers)
        for i, layer in profile.packed.items():
            if layer.moments is None:
                raise ConfigError("rotations are made of a profile's moments, and this one has none; calibrate one")
            layers[i] = derive_layer(self.transform(layer.moments), layer)
        return replace(profile, layers=layers, transform="oscar", tuning=None)

    def _basis(self, c: Tensor) -> Tensor:
        if not self.per_head:
            c = c.mean(0, keepdim=True).expand_as(c)
        _, u = sorted_eigh(c)
        if self.mix != "U":
            u = u @ flat_orthogonal(c.shape[-1])
        return u[..., bit_reversal(c.shape[-1])] if self.mix == "U H P" else u


@dataclass(frozen=True)
class Variant(Arm):
    """An arm of a study.

    Attributes
    ----------
    rotation : Rotation or None
        Basis, instead of ``transform``.
    window : WindowConfig or None
        Its own exact windows; None for the run's.
    group : int or None
        Channels that share a scale, which is simulated; None for a head's, which is stored.
    source : Profile or None
        Another calibration, instead of the run's profile.
    """

    rotation: Rotation | None = None
    window: WindowConfig | None = None
    group: int | None = None
    source: Profile | None = field(default=None, repr=False, compare=False)

    def profile(self, profile: Profile) -> Profile:
        """The profile that the arm reads and writes with."""
        base = self.source or profile
        return super().profile(base) if self.rotation is None else self.rotation.profile(base)

    def cache(self, model: PreTrainedModel, profile: Profile, window: WindowConfig) -> Any:
        """An empty cache; ``profile`` is what :meth:`profile` returned."""
        window = self.window or window
        if self.group is None:
            return super().cache(model, profile, window)
        return GroupedCache(model, profile, window, self.codec, self.tiers, self.group)

    def fits(self, profile: Profile) -> bool:
        """Whether all heads can be cut into the arm's groups."""
        return self.group is None or all(layer.head_dim % self.group == 0 for layer in profile.packed.values())

    def settings(self, window: WindowConfig) -> tuple[Any, ...]:
        """What tells the arm's figures from another's: all but its name."""
        named = replace(self, name="", what="", window=self.window or window)
        return repr(named), id(self.source)


@dataclass(frozen=True)
class Study:
    """Arms that differ in one thing.

    Attributes
    ----------
    name, what : str
        Name, and one line on what is varied.
    arms : tuple of Variant
        With different names.
    against : str
        The arm that the others are compared with.
    note : str
        What a reader must know.
    """

    name: str
    what: str
    arms: tuple[Variant, ...]
    against: str
    note: str = ""


@dataclass(frozen=True)
class Finding:
    """Figures of one arm; KL in nats, with 95 % intervals.

    Attributes
    ----------
    arm, what : str
        The arm.
    simulated : bool
        Whether it was simulated instead of stored.
    bits_history, bits_at_context : float
        Bits an element of packed tokens, and of everything at the end of a sequence.
    kl, kl_low, kl_high : float
        Mean KL from the exact run over all tokens.
    more, more_low, more_high : float
        The same less that of the arm the study compares with, token by token.
    top1, ppl : float
        Share of tokens whose most likely next token is the exact run's; perplexity.
    """

    arm: str
    what: str
    simulated: bool
    bits_history: float
    bits_at_context: float
    kl: float
    kl_low: float
    kl_high: float
    more: float
    more_low: float
    more_high: float
    top1: float
    ppl: float


@dataclass(frozen=True)
class StudyResult:
    """What a study found.

    Attributes
    ----------
    study : Study
        What was asked for.
    findings : list of Finding
        One an arm.
    against : str
        The arm that the others are compared with.
    left_out : list of str
        Arms whose groups do not fit this model's heads.
    """

    study: Study
    findings: list[Finding]
    against: str
    left_out: list[str]


class Ablation:
    """Runs studies on one model, profile and text; arms that several studies share run once.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    profile : Profile
        Its profile, with moments.
    sequences : sequence of Tensor
        int64 ``[1, T]``.
    window : WindowConfig
        Exact windows, where a study does not vary them.
    seed : int
        Of the intervals' resampling.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        profile: Profile,
        sequences: Sequence[Tensor],
        window: WindowConfig | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self.profile, self.sequences = model, profile, sequences
        self.window, self.seed = window or WindowConfig(), seed
        self.known: dict[tuple[Any, ...], tuple[ArmResult, Tensor]] = {}

    def run(self, study: Study, progress: Callable[[int], Any] | None = None) -> StudyResult:
        """Measure what is not known yet; ``progress`` is called with the number of tokens done."""
        arms = [arm for arm in study.arms if arm.fits(self.profile)]
        left_out = [arm.name for arm in study.arms if not arm.fits(self.profile)]
        new = {arm.settings(self.window): arm for arm in arms if arm.settings(self.window) not in self.known}
        if new:
            self._measure(new, progress)
        found = {arm.name: self.known[arm.settings(self.window)] for arm in arms}
        against = study.against if study.against in found else next(iter(found), "")
        findings = [self._finding(arm, *found[arm.name], found[against][1]) for arm in arms]
        return StudyResult(study, findings, against, left_out)

    def _measure(self, new: dict[tuple[Any, ...], Variant], progress: Callable[[int], Any] | None) -> None:
        blocks: dict[str, list[float]] = {arm.name: [] for arm in new.values()}
        results = measure_fidelity(
            self.model, self.profile, list(new.values()), self.sequences, window=self.window, progress=progress,
            on_kl=lambda name, start, kl: blocks[name].append(float(kl.double().sum())),
        )  # fmt: skip
        tokens = sum(ids.numel() for ids in self.sequences)
        for (key, arm), result in zip(new.items(), results, strict=True):
            sums = torch.tensor(blocks[arm.name], dtype=torch.float64)
            self.known[key] = result, sums * len(sums) / tokens

    def _finding(self, arm: Variant, r: ArmResult, kl: Tensor, base: Tensor) -> Finding:
        return Finding(
            arm.name, arm.what, arm.simulated or arm.group is not None, r.bits_history, r.bits_at_context,
            *mean_interval(kl, self.seed), *mean_interval(kl - base, self.seed), r.top1, r.ppl,
        )  # fmt: skip


def mean_interval(blocks: Tensor, seed: int = 0) -> tuple[float, float, float]:
    """Mean, and the ends of its 95 % percentile bootstrap interval, of float64 ``[n]`` sums over 64-token blocks.

    Neighbouring tokens err together, so whole blocks are drawn. The same seed draws the same blocks.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(blocks), (RESAMPLES, len(blocks)), generator=generator)
    low, high = torch.quantile(blocks[drawn].mean(1), torch.tensor([0.025, 0.975], dtype=blocks.dtype))
    return float(blocks.mean()), float(low), float(high)
