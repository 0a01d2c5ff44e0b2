"""Streaming second moments of queries, keys and values of one layer (Lamina SPEC 2)."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lamina.codec import PAGE_TOKENS


@dataclass
class Moments:
    """Moments of one layer, float64 ``[H, D, D]`` except ``mean_v`` ``[H, D]``; H counts KV heads.

    Attributes
    ----------
    c_q : Tensor
        E[q'q] over the query heads of each KV head, not centred.
    c_k : Tensor
        Second moment of k about the mean of its 64-token page.
    mean_v, c_v : Tensor
        Mean and centred second moment of v.
    c_s_weighted : Tensor
        E[w v'v], w = k C_Q k' normalised to mean 1.
    c_s_softmax : Tensor
        E[o'o], o the output of causal softmax attention.
    """

    c_q: Tensor
    c_k: Tensor
    mean_v: Tensor
    c_v: Tensor
    c_s_weighted: Tensor
    c_s_softmax: Tensor

    def names(self) -> list[str]:
        """Field names, in storage order."""
        return [f.name for f in fields(self)]


class MomentAccumulator:
    """Accumulates :class:`Moments` and a small reservoir of whole pages over the forward passes of one layer.

    Parameters
    ----------
    skip : int
        First tokens of each sequence that enter no statistic (never quantised).
    reservoir_pages : int
        Pages of k and v rows kept, sampled uniformly.
    generator : torch.Generator
        Source of the sampling.
    """

    def __init__(self, skip: int, reservoir_pages: int, generator: torch.Generator) -> None:
        self.skip = skip
        self.reservoir_pages = reservoir_pages
        self.generator = generator
        self.n_q = self.n_kv = self.n_paged = self.n_out = self.pages_seen = 0
        self.sums: dict[str, Tensor] = {}
        self.k_pages: list[Tensor] = []
        self.v_pages: list[Tensor] = []

    def update(self, q_bhtd: Tensor, k_bhtd: Tensor, v_bhtd: Tensor, o_bthd: Tensor) -> None:
        """Add one forward pass.

        Parameters
        ----------
        q_bhtd, k_bhtd, v_bhtd : Tensor
            ``[B, Hq, T, D]`` and ``[B, H, T, D]``, after RoPE and q/k norms.
        o_bthd : Tensor
            ``[B, T, Hq, D]``, the attention output.
        """
        batch, n_kv, tokens, _ = k_bhtd.shape
        if tokens <= self.skip:
            return
        self._add_queries(q_bhtd, o_bthd, n_kv)
        k, v = (x[:, :, self.skip :].double() for x in (k_bhtd, v_bhtd))
        self._add("c_v", v)
        self.sums["mean_v"] = self.sums.get("mean_v", 0) + v.sum((0, 2))
        c_q = self.sums["c_q"] / self.n_q
        w = torch.einsum("bhtd,hde,bhte->bht", k, c_q, k)
        self._add("c_s_weighted", v, w / w.mean((0, 2), keepdim=True).clamp(min=1e-30))
        self.n_kv += batch * v.shape[2]

        whole = v.shape[2] // PAGE_TOKENS
        if whole:
            cut = whole * PAGE_TOKENS
            k_pages, v_pages = (x[:, :, :cut].unflatten(2, (whole, PAGE_TOKENS)) for x in (k, v))
            self._add("c_k", (k_pages - k_pages.mean(3, keepdim=True)).flatten(2, 3))
            self.n_paged += batch * cut
            self._sample(k_pages, v_pages)

    def add_queries(self, q_bhtd: Tensor, o_bthd: Tensor) -> None:
        """Add queries and outputs of another layer that reads this layer's keys and values."""
        if q_bhtd.shape[2] > self.skip:
            self._add_queries(q_bhtd, o_bthd, self.sums["c_q"].shape[0])

    def _add_queries(self, q_bhtd: Tensor, o_bthd: Tensor, n_kv: int) -> None:
        q, o = q_bhtd[:, :, self.skip :].double(), o_bthd[:, self.skip :].double().transpose(1, 2)
        q, o = (x.reshape(x.shape[0], n_kv, -1, x.shape[-1]) for x in (q, o))
        self._add("c_q", q)
        self._add("c_s_softmax", o)
        self.n_q += q.shape[0] * q.shape[2]
        self.n_out += o.shape[0] * o.shape[2]

    def result(self) -> Moments:
        """Moments so far; needs at least one whole page."""
        mean_v = self.sums["mean_v"] / self.n_kv
        return Moments(
            c_q=self.sums["c_q"] / self.n_q,
            c_k=self.sums["c_k"] / self.n_paged,
            mean_v=mean_v,
            c_v=self.sums["c_v"] / self.n_kv - mean_v[:, :, None] * mean_v[:, None, :],
            c_s_weighted=self.sums["c_s_weighted"] / self.n_kv,
            c_s_softmax=self.sums["c_s_softmax"] / self.n_out,
        )

    def reservoir(self) -> tuple[Tensor, Tensor]:
        """Sampled pages of k and v rows: two float32 ``[n, H, 64, D]``."""
        return torch.stack(self.k_pages), torch.stack(self.v_pages)

    def _add(self, name: str, x: Tensor, weight: Tensor | None = None) -> None:
        left = x if weight is None else x * weight[..., None]
        product = torch.einsum("bhtd,bhte->hde", left, x)
        self.sums[name] = self.sums[name] + product if name in self.sums else product

    def _sample(self, k_pages: Tensor, v_pages: Tensor) -> None:
        """Reservoir sampling over the pages of ``[B, H, n, 64, D]``."""
        for k_page, v_page in zip(k_pages.transpose(1, 2).flatten(0, 1), v_pages.transpose(1, 2).flatten(0, 1)):
            self.pages_seen += 1
            if len(self.k_pages) < self.reservoir_pages:
                self.k_pages.append(k_page.float().cpu())
                self.v_pages.append(v_page.float().cpu())
                continue
            slot = int(torch.randint(self.pages_seen, (1,), generator=self.generator))
            if slot < self.reservoir_pages:
                self.k_pages[slot], self.v_pages[slot] = k_page.float().cpu(), v_page.float().cpu()
