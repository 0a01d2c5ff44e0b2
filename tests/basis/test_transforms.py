"""The four transforms: what they promise of logits, values and second moments (SPEC 3)."""

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import generator, random_orthogonal
from lamina.basis.hadamard import bit_reversal, flat_orthogonal
from lamina.basis.moments import Moments
from lamina.basis.transforms import LayerTransform, TransformName, check_condition, make_transform, ridge
from lamina.codec.rows import ScaleRule, dequantise_rows, quantise_rows
from lamina.errors import ConfigError, ProfileError

NAMES = list(TransformName)
SHAPES = [(1, 16), (2, 64), (3, 80), (2, 112)]


def covariance(heads: int, dim: int, g: torch.Generator, spread: float) -> Tensor:
    """Random positive definite matrices with eigenvalues over ``10**spread``, float64 ``[H, D, D]``."""
    q = random_orthogonal(heads, dim, g)
    values = 10 ** (spread * torch.rand(heads, 1, dim, generator=g, dtype=torch.float64) - spread / 2)
    return (q * values) @ q.mT


def moments(heads: int, dim: int, seed: int = 0, spread: float = 2.0) -> Moments:
    g = generator(seed)
    c_q, c_k, c_v, weighted, softmax = (covariance(heads, dim, g, spread) for _ in range(5))
    mean = torch.randn(heads, dim, generator=g, dtype=torch.float64)
    return Moments(c_q, c_k, mean, c_v, weighted, softmax)


def in_basis(c: Tensor, a: Tensor) -> Tensor:
    return a.mT @ c @ a


def diagonal_of(c: Tensor) -> Tensor:
    return c.diagonal(dim1=-2, dim2=-1)


def off_diagonal(c: Tensor) -> float:
    """Largest off-diagonal element relative to the diagonal's scale."""
    rest = c - torch.diag_embed(diagonal_of(c))
    return float(rest.abs().max() / diagonal_of(c).abs().max())


def without_flat(a: Tensor, permuted: bool = False) -> Tensor:
    """The basis before the Hadamard matrix (and OSCAR's bit reversal) was applied."""
    dim = a.shape[-1]
    if permuted:
        a = a[..., bit_reversal(dim).argsort()]
    return a @ flat_orthogonal(dim).T


@pytest.mark.parametrize(("heads", "dim"), SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_values_survive_the_basis(name: TransformName, heads: int, dim: int) -> None:
    """q'.k' = q.k and v' R' + m = v in float64: the product of read and stored basis is the identity."""
    t = make_transform(name, moments(heads, dim))
    g = generator(1)
    q, k, v = torch.randn(3, heads, 20, dim, generator=g, dtype=torch.float64)
    torch.testing.assert_close((q @ t.q_forward) @ (k @ t.k_forward).mT, q @ k.mT, rtol=1e-9, atol=1e-9)
    packed = (v - t.mean_v[:, None]) @ t.v_forward
    torch.testing.assert_close(packed @ t.v_forward.mT + t.mean_v[:, None], v, rtol=1e-10, atol=1e-10)
    eye = torch.eye(dim, dtype=torch.float64).expand(heads, -1, -1)
    torch.testing.assert_close(t.v_forward @ t.v_forward.mT, eye, rtol=0, atol=1e-10)
    assert t.k_forward.dtype == torch.float64 and t.k_forward.shape == (heads, dim, dim)


@pytest.mark.parametrize(("heads", "dim"), SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_bases_in_bfloat16_are_near_and_lose_nothing(name: TransformName, heads: int, dim: int) -> None:
    """Entries are bfloat16; what they became, not what they were, is undone when rows are read."""
    t = make_transform(name, moments(heads, dim))
    stored = t.stored()
    for ours, exact in ((stored.k_forward, t.k_forward), (stored.v_forward, t.v_forward)):
        assert ours.dtype == torch.float32 and torch.equal(ours, ours.bfloat16().float())
        torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=0)
    q, k, v = torch.randn(3, heads, 20, dim, generator=generator(1), dtype=torch.float64)
    logits = (q @ stored.q_forward.double()) @ (k @ stored.k_forward.double()).mT
    torch.testing.assert_close(logits, q @ k.mT, rtol=0, atol=2e-5 * float(k.square().sum(-1).max()))
    torch.testing.assert_close(v @ stored.v_forward.double() @ stored.v_back.double().mT, v, rtol=0, atol=2e-6)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("off", [0.0, 0.001, float("nan")])
def test_a_basis_that_rounding_ruins_is_refused(side: int, off: float) -> None:
    bad, good = torch.tensor([[[1.0, 1.0], [1.0, 1.0 + off]]], dtype=torch.float64), torch.eye(2).double()[None]
    k, v = (bad, good) if side == 0 else (good, bad)
    with pytest.raises(ProfileError, match=("a key basis", "a value basis")[side]):
        LayerTransform(k, good, v, torch.zeros(1, 2)).stored()


def test_rounding_costs_little_where_it_is_let_pass() -> None:
    """Condition numbers up to 1,000 cost few per cent of a 2-bit code's accuracy; 10,000 is refused."""
    g, dim = generator(0), 128
    left, right = random_orthogonal(1, dim, g), random_orthogonal(1, dim, g)
    for condition, passes in ((30.0, True), (1e3, True), (1e4, False)):
        a = left * torch.logspace(0, -float(np.log10(condition)), dim, dtype=torch.float64) @ right
        t = LayerTransform(a, torch.linalg.inv(a).mT, right, torch.zeros(1, dim))
        if not passes:
            with pytest.raises(ProfileError, match="nearly"):
                t.stored()
            continue
        packed = torch.randn(1, 1, 64, dim, generator=g, dtype=torch.float64)
        k, q = packed[0] @ torch.linalg.inv(a), torch.randn(1, 64, dim, generator=g, dtype=torch.float64) @ a.mT
        errors = []
        for forward, read in (
            (a, torch.linalg.inv(a).mT),
            (t.stored().k_forward.double(), t.stored().q_forward.double()),
        ):
            codes, scale, mid = quantise_rows(k @ forward, 2, ScaleRule.UNBIASED)
            y = dequantise_rows(codes, scale, mid, 2)
            errors.append(float(((q @ read) @ (y - k @ forward).mT).square().mean()))
        assert errors[1] < 1.1 * errors[0]


@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_identity_and_hadamard_need_no_moments(heads: int, dim: int) -> None:
    plain = make_transform("identity", n_heads=heads, head_dim=dim)
    flat = make_transform("hadamard", n_heads=heads, head_dim=dim)
    for t, basis in ((plain, torch.eye(dim, dtype=torch.float64)), (flat, flat_orthogonal(dim))):
        for x in (t.k_forward, t.q_forward, t.v_forward):
            assert torch.equal(x, basis.expand(heads, -1, -1))
        assert not t.mean_v.any()
    spike = torch.zeros(dim, dtype=torch.float64)
    spike[3] = 1.0
    assert float((spike @ flat.k_forward[0]).abs().max()) == pytest.approx(dim**-0.5)


@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_balanced_solves_the_geometric_mean(heads: int, dim: int) -> None:
    """A A' = G with G C_K G = C_Q: the least tr(A^-1 C_Q A^-T) tr(A' C_K A) there is."""
    m = moments(heads, dim)
    t = make_transform("balanced", m)
    c_q, c_k = ridge(m.c_q), ridge(m.c_k)
    g = t.k_forward @ t.k_forward.mT
    torch.testing.assert_close(g @ c_k @ g, c_q, rtol=1e-6, atol=1e-8 * float(c_q.abs().max()))
    torch.testing.assert_close(
        t.k_forward @ t.q_forward.mT, torch.eye(dim).double().expand(heads, -1, -1), rtol=0, atol=1e-8
    )


@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_balanced_makes_both_products_one_diagonal(heads: int, dim: int) -> None:
    m = moments(heads, dim)
    t = make_transform("balanced", m)
    keys = in_basis(ridge(m.c_k), without_flat(t.k_forward))
    queries = in_basis(ridge(m.c_q), without_flat(t.q_forward))
    assert off_diagonal(keys) < 1e-8 and off_diagonal(queries) < 1e-8
    torch.testing.assert_close(diagonal_of(keys), diagonal_of(queries), rtol=1e-7, atol=0)
    assert bool((diagonal_of(keys).diff(dim=-1) <= 1e-12).all()), "descending"


def test_the_ridge_is_a_ten_thousandth_of_the_mean_diagonal() -> None:
    c = moments(2, 16).c_k
    added = ridge(c) - c
    level = 1e-4 * diagonal_of(c).mean(-1)
    torch.testing.assert_close(added, level[:, None, None] * torch.eye(16).double(), rtol=1e-9, atol=1e-12)


def error_bound(t: LayerTransform, m: Moments) -> Tensor:
    """tr(A^-1 C_Q A^-T) tr(A' C_K A) / D, what SPEC 3 minimises."""
    keys = diagonal_of(in_basis(m.c_k, t.k_forward)).sum(-1)
    return keys * diagonal_of(in_basis(m.c_q, t.q_forward)).sum(-1) / t.k_forward.shape[-1]


def test_balanced_has_the_least_expected_logit_error() -> None:
    m = moments(2, 64)
    best = error_bound(make_transform("balanced", m), m)
    for name in ("identity", "hadamard", "oscar"):
        assert bool((error_bound(make_transform(name, m), m) > 1.2 * best).all())
    t = make_transform("balanced", m)
    g = generator(3)
    for _ in range(5):
        nudge = torch.eye(64).double() + 0.05 * torch.randn(2, 64, 64, generator=g, dtype=torch.float64)
        other = LayerTransform(t.k_forward @ nudge, t.q_forward @ torch.linalg.pinv(nudge).mT, t.v_forward, t.mean_v)
        assert bool((error_bound(other, m) >= best * 0.9999).all())


@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_the_top_component_becomes_the_row_mean(heads: int, dim: int) -> None:
    """H's first row is constant, so what is most in a row sits in its midpoint, which has 16 bits."""
    m = moments(heads, dim)
    t = make_transform("balanced", m)
    ones = torch.full((dim,), dim**-0.5, dtype=torch.float64)
    for c, basis in ((ridge(m.c_k), t.k_forward), (m.c_s_weighted, t.v_forward)):
        held = in_basis(c, basis)
        along_mean = torch.einsum("d,hde,e->h", ones, held, ones)
        torch.testing.assert_close(along_mean, torch.linalg.eigvalsh(held)[:, -1], rtol=1e-8, atol=0)
    assert torch.equal(t.mean_v, m.mean_v)


@pytest.mark.parametrize("target", ["weighted", "softmax"])
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_oscar_diagonalises(heads: int, dim: int, target: str) -> None:
    m = moments(heads, dim)
    t = make_transform("oscar", m, target=target)
    c_s = m.c_s_weighted if target == "weighted" else m.c_s_softmax
    for c, basis in ((m.c_q, t.k_forward), (c_s, t.v_forward)):
        diagonal = in_basis(c, without_flat(basis, permuted=True))
        assert off_diagonal(diagonal) < 1e-10
        torch.testing.assert_close(diagonal_of(diagonal), torch.linalg.eigvalsh(c).flip(-1), rtol=1e-9, atol=0)
        flat = diagonal_of(in_basis(c, basis))
        torch.testing.assert_close(flat, diagonal_of(c).mean(-1, keepdim=True).expand_as(flat), rtol=1e-9, atol=0)
    assert torch.equal(t.k_forward, t.q_forward)
    assert not t.mean_v.any()


def test_published_oscar_shares_one_basis() -> None:
    m = moments(3, 64)
    t = make_transform("oscar", m, per_head=False)
    for basis, c in ((t.k_forward, m.c_q), (t.v_forward, m.c_s_weighted)):
        assert torch.equal(basis[0], basis[1]) and torch.equal(basis[0], basis[2])
        assert off_diagonal(in_basis(c.mean(0, keepdim=True), without_flat(basis[:1], permuted=True))) < 1e-10
    assert not torch.equal(make_transform("oscar", m).k_forward[0], t.k_forward[0])


@pytest.mark.parametrize("name", ["oscar", "balanced"])
def test_bases_are_reproducible(name: str) -> None:
    first, second = (make_transform(name, moments(2, 48)) for _ in range(2))
    assert torch.equal(first.k_forward, second.k_forward) and torch.equal(first.v_forward, second.v_forward)


def test_a_large_key_offset_does_not_reach_the_basis() -> None:
    """Statistics are about the page's mean; with a rank-deficient C_K the ridge keeps A well conditioned."""
    m = moments(1, 64)
    values = torch.zeros(64, dtype=torch.float64)
    values[:8] = 1.0
    q = random_orthogonal(1, 64, generator(5))
    m.c_k = (q * values) @ q.mT
    t = make_transform("balanced", m)
    assert float(torch.linalg.cond(t.k_forward)) < 1e3


def test_wrong_settings_and_damaged_moments_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown transform 'pca'; choose one of identity, hadamard, oscar, balanced"):
        make_transform("pca", moments(1, 16))
    with pytest.raises(ConfigError, match="unknown target 'best'; choose one of weighted, softmax"):
        make_transform("oscar", moments(1, 16), target="best")
    for name in ("oscar", "balanced"):
        with pytest.raises(ConfigError, match=f"transform '{name}' needs calibration moments"):
            make_transform(name, n_heads=1, head_dim=16)
        for field in ("c_q", "c_s_weighted"):
            bad = moments(1, 16)
            getattr(bad, field)[0, 3, 3] = float("nan")
            with pytest.raises(ProfileError, match=r"NaN or Inf|not finite"):
                make_transform(name, bad)
    empty = moments(1, 16)
    empty.c_k.zero_()
    with pytest.raises(ProfileError, match="second moment is zero"):
        make_transform("balanced", empty)


@pytest.mark.parametrize(("bad", "message"), [(np.nan, "NaN or Inf"), (0.0, "singular"), (1e-9, "singular")])
def test_the_condition_number_is_checked(bad: float, message: str) -> None:
    a = torch.eye(16).repeat(2, 1, 1)
    a[1, 5, 5] = bad
    with pytest.raises(ProfileError, match=message):
        check_condition(a)
    check_condition(torch.diag_embed(torch.logspace(0, 5, 16))[None])
