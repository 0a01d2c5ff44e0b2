"""Streaming moments against direct float64 sums (SPEC 2)."""

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import generator
from lamina.basis.moments import MomentAccumulator, Moments

H, G, D = 2, 3, 16


def rows(tokens: int, batch: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a causal softmax attention output, as an engine hands them over."""
    g = generator(seed)
    q = torch.randn(batch, H * G, tokens, D, generator=g)
    k, v = torch.randn(2, batch, H, tokens, D, generator=g)
    k = k + 3 + torch.linspace(0, 5, tokens)[:, None]
    logits = (q.unflatten(1, (H, G)) @ k[:, :, None].mT) / 4
    weights = logits.masked_fill(~torch.ones(tokens, tokens).tril().bool(), float("-inf")).softmax(-1)
    o = (weights @ v[:, :, None]).flatten(1, 2).transpose(1, 2)
    return q, k, v, o


def direct(passes: list[tuple[Tensor, ...]], skip: int) -> Moments:
    """The definitions, head by head, row by row."""
    out = {name: [] for name in ("c_q", "c_k", "mean_v", "c_v", "c_s_weighted", "c_s_softmax")}
    for h in range(H):
        qs, ks, vs, os, pages = [], [], [], [], []
        for q, k, v, o in passes:
            for b in range(q.shape[0]):
                for j in range(h * G, h * G + G):
                    qs += list(q[b, j, skip:].double().numpy())
                    os += list(o[b, skip:, j].double().numpy())
                ks += list(k[b, h, skip:].double().numpy())
                vs += list(v[b, h, skip:].double().numpy())
                after = k[b, h, skip:].double().numpy()
                for p in range(len(after) // 64):
                    page = after[64 * p : 64 * p + 64]
                    pages += list(page - page.mean(0))
        q_rows, k_rows, v_rows, o_rows, p_rows = (np.array(x) for x in (qs, ks, vs, os, pages))
        c_q = q_rows.T @ q_rows / len(q_rows)
        w = np.array([x @ c_q @ x for x in k_rows])
        w /= w.mean()
        centred = v_rows - v_rows.mean(0)
        out["c_q"].append(c_q)
        out["c_k"].append(p_rows.T @ p_rows / len(p_rows))
        out["mean_v"].append(v_rows.mean(0))
        out["c_v"].append(centred.T @ centred / len(v_rows))
        out["c_s_weighted"].append((v_rows * w[:, None]).T @ v_rows / len(v_rows))
        out["c_s_softmax"].append(o_rows.T @ o_rows / len(o_rows))
    return Moments(**{name: torch.from_numpy(np.stack(x)) for name, x in out.items()})


def streamed(passes: list[tuple[Tensor, ...]], skip: int) -> Moments:
    stats = MomentAccumulator(skip, 4, generator(0))
    for one in passes:
        stats.update(*one)
    return stats.result()


@pytest.mark.parametrize("skip", [0, 64, 70])
@pytest.mark.parametrize("tokens", [64 + 70, 300])
def test_one_pass_equals_the_definitions(tokens: int, skip: int) -> None:
    passes = [rows(tokens)]
    ours, expected = streamed(passes, skip), direct(passes, skip)
    for name in ours.names():
        assert getattr(ours, name).dtype == torch.float64
        torch.testing.assert_close(getattr(ours, name), getattr(expected, name), rtol=1e-9, atol=1e-9)


def test_several_passes_equal_the_definitions() -> None:
    """All but the weights of `weighted`, which use the statistics so far, as a streaming pass must."""
    passes = [rows(200, seed=1), rows(333, batch=1, seed=2), rows(64 + 64, batch=3, seed=3)]
    ours, expected = streamed(passes, 64), direct(passes, 64)
    for name in ours.names():
        tolerance = 0.05 if name == "c_s_weighted" else 1e-9
        torch.testing.assert_close(getattr(ours, name), getattr(expected, name), rtol=tolerance, atol=tolerance)


def test_weights_have_mean_one() -> None:
    """With equal v rows `weighted` is v'v whatever the keys are."""
    q, k, v, o = rows(200)
    v = torch.ones_like(v)
    m = streamed([(q, k, v, o), (q, 5 * k, v, o)], 64)
    torch.testing.assert_close(m.c_s_weighted, torch.ones_like(m.c_s_weighted), rtol=1e-12, atol=1e-12)


def test_keys_are_centred_by_page_and_queries_are_not() -> None:
    q, k, v, o = rows(64 * 3)
    offset = torch.randn(3, D, generator=generator(9)).repeat_interleave(64, 0) * 100
    plain, shifted = streamed([(q, k, v, o)], 0), streamed([(q, k + offset, v, o)], 0)
    torch.testing.assert_close(plain.c_k, shifted.c_k, rtol=1e-3, atol=1e-3)
    uncentred = streamed([(q + 10, k, v, o)], 0)
    assert float(uncentred.c_q.mean()) > 90


def test_short_passes_and_skipped_rows_enter_nothing() -> None:
    long, short = rows(200), rows(64, seed=5)
    poisoned = tuple(x.clone() for x in long)
    for x in poisoned[:3]:
        x[:, :, :64] = 1e6
    poisoned[3][:, :64] = 1e6
    expected = streamed([long], 64)
    for passes in ([short, long], [long, short], [poisoned]):
        ours = streamed(passes, 64)
        for name in ours.names():
            assert torch.equal(getattr(ours, name), getattr(expected, name)), name


def test_a_rest_shorter_than_a_page_is_no_page() -> None:
    stats = MomentAccumulator(64, 4, generator(0))
    stats.update(*rows(64 + 63))
    assert stats.n_paged == 0 and stats.pages_seen == 0
    stats.update(*rows(64 + 64 + 63))
    assert stats.n_paged == 2 * 64 and stats.pages_seen == 2


def test_the_reservoir_is_a_uniform_sample_of_whole_pages() -> None:
    counts = np.zeros(20)
    for seed in range(150):
        stats = MomentAccumulator(0, 4, generator(seed))
        for i in range(10):
            q, k, v, o = (torch.zeros(1, 1, 128, 4) for _ in range(4))
            k[0, 0, :64], k[0, 0, 64:] = 2 * i, 2 * i + 1
            stats.update(q, k, v - k, o)
        k_pages, v_pages = stats.reservoir()
        assert k_pages.shape == (4, 1, 64, 4) and torch.equal(v_pages, -k_pages)
        ids = k_pages[:, 0, 0, 0].int().tolist()
        assert len(set(ids)) == 4 and bool((k_pages == k_pages[:, :, :1, :1]).all())
        counts[ids] += 1
    # 150 draws of 4 in 20: 30 each, standard deviation 4.9
    assert counts.min() > 10 and counts.max() < 52 and abs(counts[:10].sum() - 300) < 60
