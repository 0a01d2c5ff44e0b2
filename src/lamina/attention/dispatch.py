"""Which attention path runs where."""

import logging

import torch
from torch import Tensor

from lamina.attention.blocked import attend_blocked
from lamina.attention.types import AttentionOutput, ReadBasis
from lamina.pages.view import StoreView

CPU_KERNEL_QUERIES = 8
"""Query tokens up to which the CPU kernel is used; longer chunks are faster as matrix products."""

CPU_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

logger = logging.getLogger("lamina")
_announced: set[str] = set()


def attend(q_bhtd: Tensor, view: StoreView, basis: ReadBasis, chunk: tuple[Tensor, Tensor]) -> AttentionOutput:
    """Attend from the last T tokens of each sequence over pages and the tokens' own rows.

    Parameters
    ----------
    q_bhtd : Tensor
        ``[B, Hq, T, D]``, after RoPE.
    view : StoreView
        Pages, the T tokens included.
    basis : ReadBasis
        How packed rows are read.
    chunk : (Tensor, Tensor)
        Rows ``[B, H, T, D]`` of these T tokens.
    """
    known = view.exact.dtype in CPU_KERNEL_DTYPES
    if q_bhtd.device.type == "cpu" and q_bhtd.shape[2] <= CPU_KERNEL_QUERIES and known:
        from lamina.attention.cpu import attend_cpu

        return attend_cpu(q_bhtd, view, basis).with_sinks(basis.sinks)
    if q_bhtd.device.type != "cpu" or not known:
        _announce_once(f"{q_bhtd.device.type} in {view.exact.dtype}")
    return attend_blocked(q_bhtd, view, basis, chunk).with_sinks(basis.sinks)


def _announce_once(what: str) -> None:
    if what not in _announced:
        _announced.add(what)
        logger.warning(
            "attention on %s runs in plain torch, in float32: compiled kernels are for CPU rows of 16 or 32 bits",
            what,
        )
