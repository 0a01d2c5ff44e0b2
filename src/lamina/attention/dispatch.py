"""Which attention path runs where."""

import logging

import torch
from torch import Tensor

from lamina.attention.blocked import attend_blocked
from lamina.attention.types import AttentionOutput, ReadBasis
from lamina.basis.encoder import PageEncoder
from lamina.pages.view import StoreView
from lamina.pages.writer import EncodingWriter, PageWriter

KERNEL_QUERIES = 8
"""Query tokens up to which the kernels are used; longer chunks are faster as matrix products."""

CPU_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

logger = logging.getLogger("lamina")
_announced: set[str] = set()


def page_writer(encoder: PageEncoder, dtype: torch.dtype) -> PageWriter:
    """What encodes a layer's full pages, engine rows being of ``dtype``."""
    if encoder.k_forward.device.type == "cuda":
        from lamina.attention.cuda.encode import CudaPageWriter
        from lamina.attention.cuda.gpu import objection

        reason = objection(encoder.k_forward.device, dtype, encoder.k_forward.shape[-1])
        if reason is None:
            return CudaPageWriter(encoder, dtype)
        announce_once(f"pages are encoded in plain torch: {reason}")
    return EncodingWriter(encoder)


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
    device, few = q_bhtd.device.type, q_bhtd.shape[2] <= KERNEL_QUERIES
    if few and device == "cpu" and view.exact.dtype in CPU_KERNEL_DTYPES:
        from lamina.attention.cpu import attend_cpu

        announce_once("attention: decoding on the CPU reads packed planes in a compiled kernel", slow=False)
        return attend_cpu(q_bhtd, view, basis).with_sinks(basis.sinks)
    if device == "cuda":
        from lamina.attention.cuda import decode, prefill

        announce_once("attention: CUDA kernels read packed planes, compiled on first use", slow=False)
        if few and decode.why_not(q_bhtd, view) is None:
            return decode.attend_cuda(q_bhtd, view, basis).with_sinks(basis.sinks)
        reason = prefill.why_not(q_bhtd, view) if basis.rows is None else "errors are to be measured"
        if reason is None:
            return prefill.attend_prefill(q_bhtd, view, basis, chunk).with_sinks(basis.sinks)
        what = "decoding" if few else "prefill"
        announce_once(f"attention: {what} runs in plain torch, in float32: {reason}")
    elif few:
        announce_once(
            f"attention: decoding on {device} in {view.exact.dtype} runs in plain torch, in float32: there is no kernel"
        )
    return attend_blocked(q_bhtd, view, basis, chunk).with_sinks(basis.sinks)


def announce_once(what: str, *, slow: bool = True) -> None:
    """Log which path is taken, once; one that is slower than what the machine could do as a warning."""
    if what not in _announced:
        _announced.add(what)
        logger.log(logging.WARNING if slow else logging.INFO, "%s", what)
