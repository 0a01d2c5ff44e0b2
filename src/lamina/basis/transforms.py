"""The four transforms: the basis in which rows are stored (Lamina SPEC 3)."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import torch
from torch import Tensor

from lamina.basis.hadamard import bit_reversal, flat_orthogonal
from lamina.basis.moments import Moments
from lamina.errors import ConfigError, ProfileError

Choice = TypeVar("Choice", bound=StrEnum)

RIDGE = 1e-4
MAX_CONDITION = 1e6
MAX_CHANGE = 1.0
"""How far rounding a basis to bfloat16 may move a row, as a share of its length."""


class TransformName(StrEnum):
    """Names of the transforms."""

    IDENTITY = "identity"
    HADAMARD = "hadamard"
    OSCAR = "oscar"
    BALANCED = "balanced"


class Target(StrEnum):
    """Which second moment an ``oscar`` basis diagonalises for V."""

    WEIGHTED = "weighted"
    SOFTMAX = "softmax"


@dataclass
class LayerTransform:
    """Bases of one layer; H counts KV heads, rows are multiplied from the right.

    Attributes
    ----------
    k_forward : Tensor
        A, ``[H, D, D]``: packed keys are k A.
    q_forward : Tensor
        A^-T, ``[H, D, D]``: packed keys are read with q A^-T.
    v_forward : Tensor
        R, ``[H, D, D]``, orthogonal: packed values are (v - mean_v) R.
    mean_v : Tensor
        ``[H, D]``.
    """

    k_forward: Tensor
    q_forward: Tensor
    v_forward: Tensor
    mean_v: Tensor

    def stored(self) -> "StoredBasis":
        """The bases that rows are stored in, see :class:`StoredBasis`.

        Raises
        ------
        ProfileError
            If a basis is singular, or rounding changes it too much.
        """
        k, v = (x.float().bfloat16().double() for x in (self.k_forward, self.v_forward))
        check_rounding(self.k_forward.double(), k, "key")
        check_rounding(self.v_forward.double(), v, "value")
        q, back = (torch.linalg.inv(x).mT.contiguous().float() for x in (k, v))
        return StoredBasis(k.float(), q, v.float(), back, self.mean_v.float().contiguous())

    def float(self) -> "LayerTransform":
        """The same bases in float32."""
        return LayerTransform(
            self.k_forward.float(), self.q_forward.float(), self.v_forward.float(), self.mean_v.float()
        )


@dataclass(frozen=True)
class StoredBasis:
    """Bases of one layer as pages are stored in them: A and R with entries rounded to bfloat16, and what undoes these.

    A product of bfloat16 rows is exact but for its sum then, in one pass of a matrix unit; and nothing is lost, as rows
    are read with the inverses of what the bases became. All are float32 ``[H, D, D]`` but ``mean_v`` ``[H, D]``.

    Attributes
    ----------
    k_forward, q_forward : Tensor
        A and A^-T.
    v_forward, v_back : Tensor
        R, nearly orthogonal, and R^-T: packed values o' are turned back by o' v_back'.
    mean_v : Tensor
        As in :class:`LayerTransform`.
    """

    k_forward: Tensor
    q_forward: Tensor
    v_forward: Tensor
    v_back: Tensor
    mean_v: Tensor


def make_transform(
    name: TransformName | str,
    moments: Moments | None = None,
    *,
    n_heads: int = 0,
    head_dim: int = 0,
    per_head: bool = True,
    target: Target | str = Target.WEIGHTED,
) -> LayerTransform:
    """Bases of one layer in float64.

    Parameters
    ----------
    name : TransformName
        ``identity``, ``hadamard`` (QuaRot), ``oscar`` (arXiv 2605.17757) or ``balanced``.
    moments : Moments, optional
        Needed by ``oscar`` and ``balanced``.
    n_heads, head_dim : int
        Needed without moments.
    per_head : bool
        For ``oscar``: one basis a KV head, or (as published) one a layer.
    target : Target
        For ``oscar``: the V statistic.

    Raises
    ------
    ConfigError
        Unknown name, or missing moments.
    ProfileError
        Moments that are not finite, or give a singular basis.
    """
    name = _parse(TransformName, name, "transform")
    target = _parse(Target, target, "target")
    if moments is not None:
        n_heads, head_dim = moments.mean_v.shape
    h = flat_orthogonal(head_dim)
    if name in (TransformName.OSCAR, TransformName.BALANCED):
        if moments is None:
            raise ConfigError(f"transform '{name}' needs calibration moments; run `lamina calibrate` first")
        return _oscar(moments, h, per_head, target) if name is TransformName.OSCAR else _balanced(moments, h)
    basis = torch.eye(head_dim, dtype=torch.float64) if name is TransformName.IDENTITY else h
    basis = basis.expand(n_heads, -1, -1).clone()
    return LayerTransform(basis, basis.clone(), basis.clone(), torch.zeros(n_heads, head_dim, dtype=torch.float64))


def _oscar(moments: Moments, h: Tensor, per_head: bool, target: Target) -> LayerTransform:
    c_s = moments.c_s_weighted if target is Target.WEIGHTED else moments.c_s_softmax
    bases = []
    for c in (moments.c_q, c_s):
        if not per_head:
            c = c.mean(0, keepdim=True).expand_as(c)
        _, u = sorted_eigh(c)
        bases.append((u @ h)[..., bit_reversal(h.shape[0])])
    return LayerTransform(bases[0], bases[0].clone(), bases[1], torch.zeros_like(moments.mean_v))


def _balanced(moments: Moments, h: Tensor) -> LayerTransform:
    """A = G^1/2 W H with G = C_K^-1 # C_Q; R = U_S H (Lamina SPEC 3).

    Eigenvectors come in descending order: H's first row is constant, so the largest component becomes the mean of the
    packed row, which the row's midpoint stores in 16 bits.
    """
    c_q, c_k = ridge(moments.c_q), ridge(moments.c_k)
    k_root, k_inverse_root = matrix_roots(c_k)
    middle, _ = matrix_roots(k_root @ c_q @ k_root)
    g_root, g_inverse_root = matrix_roots(k_inverse_root @ middle @ k_inverse_root)
    _, w = sorted_eigh(g_root @ c_k @ g_root)
    k_forward = g_root @ w @ h
    q_forward = g_inverse_root @ w @ h
    _, u = sorted_eigh(moments.c_s_weighted)
    check_condition(k_forward)
    return LayerTransform(k_forward, q_forward, u @ h, moments.mean_v.clone())


def ridge(c: Tensor) -> Tensor:
    """Add 1e-4 of the mean diagonal: ``[H, D, D]``."""
    level = RIDGE * c.diagonal(dim1=-2, dim2=-1).mean(-1)
    if not bool(torch.isfinite(c).all()) or bool((level <= 0).any()):
        raise ProfileError("a second moment is zero or not finite, so its basis is singular; calibrate on more text")
    return c + level[:, None, None] * torch.eye(c.shape[-1], dtype=c.dtype)


def sorted_eigh(c: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (descending) and eigenvectors of symmetric ``[H, D, D]``, with a fixed sign."""
    if not bool(torch.isfinite(c).all()):
        raise ProfileError("a second moment holds NaN or Inf; calibrate again")
    values, vectors = torch.linalg.eigh((c + c.mT) / 2)
    values, vectors = values.flip(-1), vectors.flip(-1)
    largest = vectors.abs().argmax(-2, keepdim=True)
    return values, vectors * vectors.gather(-2, largest).sign()


def matrix_roots(c: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric square root and inverse square root of positive definite ``[H, D, D]``."""
    values, vectors = sorted_eigh(c)
    if bool((values[..., -1] <= 0).any()):
        raise ProfileError("a second moment is singular; calibrate on more text")
    root = values.sqrt()[:, None, :]
    return (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT


def check_condition(a: Tensor) -> None:
    """Raise ProfileError unless every ``[H, D, D]`` matrix is finite and well conditioned."""
    if not bool(torch.isfinite(a).all()):
        raise ProfileError("a key basis holds NaN or Inf; calibrate again")
    worst = float(torch.linalg.cond(a.double()).max())
    if not worst < MAX_CONDITION:
        raise ProfileError(
            f"a key basis is singular (condition number {worst:.3g}, limit {MAX_CONDITION:.0e}); calibrate on more text"
        )


def check_rounding(exact: Tensor, rounded: Tensor, what: str) -> None:
    """Raise ProfileError if rows that are stored in the rounded basis are too far from those in the exact one."""
    if not bool(torch.isfinite(rounded).all()):
        raise ProfileError(f"a {what} basis holds NaN or Inf; calibrate again")
    inverse, info = torch.linalg.inv_ex(exact)
    change = float("inf") if bool(info.any()) else float(torch.linalg.matrix_norm(inverse @ (rounded - exact), 2).max())
    if not change < MAX_CHANGE:
        raise ProfileError(
            f"a {what} basis is singular, or so nearly that rounding its entries to bfloat16 moves rows by "
            f"{change:.2g} of their length (limit {MAX_CHANGE:g}); calibrate on more text"
        )


def _parse(kind: type[Choice], value: str, what: str) -> Choice:
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"unknown {what} {value!r}; choose one of {', '.join(kind)}") from None
