"""The studies of ``lamina ablate``, by name; adding one is one entry of ``STUDIES``."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from lamina.basis.profile import Profile
from lamina.codec import CodecConfig, ScaleRule
from lamina.errors import ConfigError
from lamina.eval.ablation import Rotation, Study, Variant
from lamina.eval.arms import LAMINA, OSCAR
from lamina.pages import WindowConfig

PUBLISHED = "U H P"
CALIBRATION = "calibration"


def oscar(name: str, what: str = "", **changes: Any) -> Variant:
    """OSCAR at 2 bits as published, but for some changes."""
    given: dict[str, Any] = {"rotation": Rotation(), "codec": OSCAR} | changes
    return Variant(name, what, (2, 2), **given)


def lamina(name: str, what: str = "", **changes: Any) -> Variant:
    """Lamina at 2 bits in the profile's own basis, but for some changes."""
    given: dict[str, Any] = {"codec": LAMINA} | changes
    return Variant(name, what, (2, 2), **given)


def _clip(side: str, ratio: float) -> Variant:
    what = "no clipping" if ratio == 1 else f"|x| of {side} rows clamped at its {ratio:.0%} order statistic"
    codec = replace(OSCAR, clip_k=ratio) if side == "K" else replace(OSCAR, clip_v=ratio)
    return oscar(f"{side} {ratio:.2f}", what, codec=codec)


def _group(size: int, mix: str) -> Variant:
    return oscar(f"{size}, {mix}", f"{size} channels a scale", rotation=Rotation(mix=mix), group=size, simulated=True)


def _windows(make: Any, sizes: Iterable[tuple[int, int]]) -> tuple[Variant, ...]:
    return tuple(make(f"{make.__name__} S {s} R {r}", window=WindowConfig(sink=s, recent=r)) for s, r in sizes)


STUDIES = {
    study.name: study
    for study in (
        Study(
            "rotation",
            "bases of K and V",
            (
                oscar("identity", "no rotation", rotation=None, transform="identity"),
                oscar("hadamard", "Hadamard alone (QuaRot)", rotation=None, transform="hadamard"),
                oscar("U", "eigenvectors of Q'Q and of the weighted V'V", rotation=Rotation(mix="U")),
                oscar("U H", "then Hadamard", rotation=Rotation(mix="U H")),
                oscar(PUBLISHED, "then bit reversal (OSCAR)"),
                oscar("U H P a head", "one basis a KV head, not one a layer", rotation=Rotation(per_head=True)),
                oscar("balanced", "Lamina's basis, OSCAR's codec", rotation=None, transform="balanced"),
                lamina("lamina", "the profile's basis, Lamina's codec"),
            ),
            PUBLISHED,
            "all but the last with OSCAR's codec. P reorders channels, which changes nothing while one scale serves a "
            "whole head: U H and U H P hold the same codes in another order. Where groups are smaller, study group "
            "has both.",
        ),
        Study(
            "target",
            "matrices whose eigenvectors are used",
            tuple(
                oscar(f"{k}, {v}", f"K by {k}, V by {v}", rotation=Rotation(k=k, v=v))
                for k, v in (
                    ("Q'Q", "weighted"),
                    ("Q'Q", "softmax"),
                    ("Q'Q", "V'V"),
                    ("K'K", "weighted"),
                    ("K'K", "V'V"),
                )
            ),
            "Q'Q, weighted",
            "OSCAR's codec. weighted is what its reference implementation computes, softmax what its paper writes. K'K "
            "is about each page's mean, V'V not centred.",
        ),
        Study(
            "window",
            "exact tokens at the start (S) and at the end (R)",
            _windows(oscar, ((0, 0), (64, 0), (0, 64), (64, 64), (0, 256), (64, 256)))
            + _windows(lamina, ((0, 0), (64, 64), (64, 256))),
            "oscar S 64 R 256",
            "A query's own page is exact in any case.",
        ),
        Study(
            "clip",
            "OSCAR's clip ratios of K (V at 0.92) and of V (K at 0.96)",
            tuple(_clip(side, ratio) for side in "KV" for ratio in (1.0, 0.98, 0.96, 0.92, 0.85)),
            "K 0.96",
            "K 0.96 and V 0.92 are the same arm, as published.",
        ),
        Study(
            "group",
            "channels that share a scale",
            tuple(_group(size, mix) for size in (128, 64, 32) for mix in ("U H", PUBLISHED)),
            "64, U H P",
            "Simulated: rows are quantised and dequantised again, not stored. OSCAR's codec.",
        ),
        Study(
            "codec",
            "what Lamina's codec adds",
            (
                lamina("lamina", "unbiased scales, page centers, mass correction"),
                lamina("no mass correction", codec=CodecConfig(mass_correction=False)),
                lamina("no page center", codec=CodecConfig(center=False)),
                lamina("neither", "unbiased scales alone", codec=CodecConfig(center=False, mass_correction=False)),
                lamina("minmax", "page centers", codec=CodecConfig(ScaleRule.MINMAX, mass_correction=False)),
                lamina("clip", "page centers", codec=CodecConfig(ScaleRule.CLIP, mass_correction=False)),
            ),
            "lamina",
            "In the profile's basis. Its mass correction is measured for unbiased scales, so minmax and clip go "
            "without: compare them with `no mass correction`.",
        ),
        Study(CALIBRATION, "calibration text and size", (), "", "Lamina at 2 bits, each in its own profile's basis."),
    )
}


def calibration_study(profiles: Sequence[tuple[str, Profile]]) -> Study:
    """The study of several calibrations by name, of which the first is the run's and what others are compared with."""
    arms = tuple(
        lamina(name, f"{profile.info.get('tokens', 0):,} tokens, {profile.transform}", source=profile if i else None)
        for i, (name, profile) in enumerate(profiles)
    )
    return replace(STUDIES[CALIBRATION], arms=arms, against=profiles[0][0])


def parse_studies(names: Sequence[str]) -> list[Study]:
    """Studies of these names, all without any; ConfigError lists the names if one is unknown."""
    unknown = [name for name in names if name not in STUDIES]
    if unknown:
        raise ConfigError(f"unknown study {', '.join(unknown)}; choose from {', '.join(STUDIES)}")
    return [STUDIES[name] for name in dict.fromkeys(names or STUDIES)]
