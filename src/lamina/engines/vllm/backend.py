"""vLLM's view of Lamina: the attention backend, what it is told of a step, and one layer's attention."""

import itertools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from lamina.attention.cuda.decode import MOST_QUERIES, NewRows, attend_cuda
from lamina.attention.cuda.parts import Group, group_rows
from lamina.attention.cuda.prefill import Itself, attend_groups, flash_attention
from lamina.attention.cuda.tables import fill_page_ids
from lamina.attention.dispatch import KERNEL_QUERIES, attend
from lamina.attention.types import AttentionOutput, ReadBasis
from lamina.codec import PAGE_TOKENS
from lamina.engines.vllm.canary import Decoding
from lamina.engines.vllm.config import decode_tokens, engine_config
from lamina.engines.vllm.sizes import LayerShape
from lamina.engines.vllm.state import WorkerState
from lamina.errors import UnsupportedModelError
from lamina.pages.view import StoreView


class LaminaBackend(AttentionBackend):
    """Pages of bit planes in vLLM's blocks."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Blocks are pages."""
        return [PAGE_TOKENS]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether pages can have such heads."""
        return head_size % 16 == 0

    @classmethod
    def supports_sink(cls) -> bool:
        """Logits that take part in the softmax without a value."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Blocks hold no more than base planes, so they cannot be moved by themselves."""
        return False

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Blocks of one layer lie behind each other."""
        return (KVCacheLayout.LBHNC,)

    @staticmethod
    def get_name() -> str:
        """Name of the member of vLLM's enumeration."""
        return "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["LaminaImpl"]:
        """One layer's attention."""
        return LaminaImpl

    @staticmethod
    def get_builder_cls() -> type["LaminaBuilder"]:
        """What a step is told with."""
        return LaminaBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Bytes of a block: a page's record, all heads in one."""
        layout = LayerShape(0, spec.num_kv_heads, 0, spec.head_size).layout
        content = layout.record_bytes // PAGE_TOKENS
        return replace(spec, dtype=torch.uint8, num_head_slots=1, state_content_bytes=content)


def cpu_backend() -> type[AttentionBackend]:
    """What ``CPU_ATTN`` stands for: Lamina where it is configured, else vLLM's own."""
    if engine_config(get_current_vllm_config().additional_config) is not None:
        return LaminaBackend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return CPUAttentionBackend


def __getattr__(name: str) -> Any:
    """``CpuBackend``, which vLLM looks up by its path, is chosen by the configuration at hand."""
    if name == "CpuBackend":
        return cpu_backend()
    raise AttributeError(name)


@dataclass(frozen=True)
class Part:
    """Rows of the batch that attend together, and their tokens, which lie behind each other; as many of each row."""

    rows: slice
    tokens: slice
    queries: int


@dataclass(frozen=True)
class Chunks:
    """Rows and tokens of the batch, many a row as of parts of prompts, and those that a GPU takes at a time."""

    rows: slice
    tokens: slice
    counts: list[int]
    groups: list[Group]


@dataclass
class LaminaMetadata:
    """A step.

    Attributes
    ----------
    parts : list of Part or Chunks
        All of the batch.
    page_ids, lengths : Tensor
        int32 ``[B, P]``, padded with -1, and ``[B]``: pages of every row and its tokens, this step's included.
    slots : Tensor
        int64 ``[tokens]``: 64 block + row that each token goes to, negative for those that fill up the batch.
    appends : bool
        Whether attention itself stores the rows, as where all decode on a GPU.
    """

    parts: list[Part | Chunks]
    page_ids: Tensor
    lengths: Tensor
    slots: Tensor
    appends: bool


class LaminaBuilder(AttentionMetadataBuilder[LaminaMetadata]):
    """Tells where a step's rows go and what its queries read, without waiting for a GPU."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.impl: LaminaImpl = next(
            iter(get_layers_from_vllm_config(vllm_config, Attention, layer_names).values())
        ).impl
        # A GPU's kernel for decoding is compiled for each number of queries.
        most = most_appended(vllm_config)
        self.few = KERNEL_QUERIES if device.type == "cpu" else min(decode_tokens(vllm_config), most)
        # Graphs know where these are.
        rows, width = (
            vllm_config.scheduler_config.max_num_seqs,
            -(-vllm_config.model_config.max_model_len // PAGE_TOKENS),
        )
        self.page_ids = torch.full((rows, width), -1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Whether decode steps can be captured."""
        if most_appended(vllm_config) < decode_tokens(vllm_config):
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_BATCH

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LaminaMetadata:
        """Find the parts of a step."""
        c, n = common_attn_metadata, common_attn_metadata.num_reqs
        page_ids, lengths, table = self.page_ids[:n], self.lengths[:n], c.block_table_tensor
        if self.device.type == "cuda":
            fill_page_ids(table, c.seq_lens, page_ids, lengths)
        else:
            # Attention in torch goes through all columns.
            width = max(-(-int(c.seq_lens[:n].max()) // PAGE_TOKENS), 1)
            lengths, ids = c.seq_lens[:n].int(), table[:n, :width]
            page_ids = torch.where(PAGE_TOKENS * torch.arange(width) < lengths[:, None], ids, -1)
        state, tokens, most = self.impl.state, c.num_actual_tokens, c.max_query_len
        alike, on_gpu = tokens == n * most and most <= self.few, self.device.type == "cuda"
        parts: list[Part | Chunks] = [Part(slice(0, n), slice(0, tokens), most)]
        if not alike:
            parts = _parts(c.query_start_loc_cpu[: n + 1].diff().tolist(), self.few)
        if not alike and on_gpu:
            parts = [self._grouped(part, c.seq_lens_cpu_upper_bound) for part in parts]
        if state is not None and state.canary is not None:
            state.canary.decoding = Decoding(page_ids, lengths, most) if alike else None
        return LaminaMetadata(parts, page_ids, lengths, c.slot_mapping[:tokens], alike and on_gpu)

    def _grouped(self, part: Part | Chunks, lengths: Tensor | None) -> Part | Chunks:
        if isinstance(part, Part):
            return part
        # Lengths are too long at most, and then not of a chunk that is the first.
        before = None if lengths is None else [x - n for n, x in zip(part.counts, lengths[part.rows].tolist())]
        impl = self.impl
        return replace(part, groups=group_rows(part.counts, impl.num_heads, impl.head_size, self.device, before))


def _parts(counts: list[int], few: int) -> list[Part | Chunks]:
    """Parts of a batch whose rows have so many tokens: those of up to ``few``, as far as they are alike, and others."""
    parts: list[Part | Chunks] = []
    row = first = 0
    for n, group in itertools.groupby(counts, lambda n: n if n <= few else -1):
        alike = list(group)
        rows, tokens = slice(row, row + len(alike)), slice(first, first + sum(alike))
        if n > 0:
            parts.append(Part(rows, tokens, n))
        elif n < 0:
            parts.append(Chunks(rows, tokens, alike, []))
        row, first = rows.stop, tokens.stop
    return parts


def most_appended(vllm_config: Any) -> int:
    """Query tokens of a row up to which the decode kernel takes them; all rows have as many then."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    group = model.get_num_attention_heads(parallel) // model.get_num_kv_heads(parallel)
    return min(KERNEL_QUERIES, MOST_QUERIES // group)


def chunk_attention(head_size: int) -> Itself:
    """Attention of long chunks to themselves: vLLM's flash attention, or torch's where that has none."""
    if not current_platform.is_cuda():
        return flash_attention
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    version = get_flash_attn_version(head_size=head_size)
    if version is None:
        return flash_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, group: Group, scaling: float, out: Tensor) -> Tensor:
        found = flash_attn_varlen_func(
            q, k, v, group.most, group.starts, group.most, cu_seqlens_k=group.starts, softmax_scale=scaling,
            causal=True, return_softmax_lse=True, out=out, fa_version=version,
        )  # fmt: skip
        lse: Tensor = found[1]
        return lse

    return attend


class LaminaImpl(AttentionImpl[LaminaMetadata]):
    """One layer's attention.

    Attributes
    ----------
    state : WorkerState
        Where its pages are; set once vLLM's blocks are there. Before, as while vLLM looks how much memory graphs take,
        the output is zero.
    """

    state: WorkerState | None = None
    index: int

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: list[float] | None,
        sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        for what, given in (
            ("ALiBi", alibi_slopes), ("sliding window", sliding_window),
            ("KV-sharing", kv_sharing_target_layer_name), (f"{attn_type}", attn_type != AttentionType.DECODER or None),
        ):  # fmt: skip
            if given is not None:
                raise UnsupportedModelError(f"Lamina in vLLM cannot serve {what} attention; run this model without it")
        if kv_cache_dtype != "auto":
            raise UnsupportedModelError(f"kv_cache_dtype={kv_cache_dtype!r}: Lamina decides the bits; leave it at auto")
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.kv_cache_dtype, self.softcap, self.sinks = kv_cache_dtype, logits_soft_cap or 0.0, sinks
        self.itself = chunk_attention(head_size)
        if engine_config(get_current_vllm_config().additional_config) is None:
            raise UnsupportedModelError(
                "the attention backend is Lamina's, but it is not configured: give "
                '--additional-config \'{"lamina": {"profile": PATH}}\''
            )

    def attach(self, state: WorkerState, index: int) -> None:
        """Tell where the pages are; this is the ``index``-th layer that runs."""
        self.state, self.index = state, index
        basis = state.bases[index]
        state.bases[index] = replace(basis, softcap=self.softcap, sinks=self.sinks)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: LaminaMetadata | None, output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Store a step's rows ``[tokens, H, D]`` and attend from its queries."""
        state, step, i = self.state, attn_metadata, getattr(self, "index", 0)
        if state is None or step is None:
            return output.zero_()
        view, basis = state.view(i, step.page_ids, step.lengths), state.bases[i]
        if step.appends:
            (part,) = step.parts
            assert isinstance(part, Part)
            q, k, v = (_by_row(x, part) for x in (query, key, value))
            kept = state.canary.kept[i] if state.canary is not None else None
            new = NewRows(k, v, state.closer.damaged, 0, kept)
            to = output[part.tokens].unflatten(0, (-1, part.queries))
            result = attend_cuda(q, view, basis, new=new, out=to if basis.sinks is None else None)
            if basis.sinks is not None:
                to.copy_(result.with_sinks(basis.sinks).out)
            return output
        n = len(step.slots)
        state.closer.write(i, key[:n], value[:n], step.slots, view)
        for part in step.parts:
            of = view.rows(part.rows)
            if isinstance(part, Chunks):
                rows = [x[part.tokens] for x in (query, key, value)]
                _attend_chunks(rows, part, of, basis, self.itself, output[part.tokens])
                continue
            q, k, v = (_by_row(x, part) for x in (query, key, value))
            output[part.tokens] = attend(q, of, basis, (k, v)).out.flatten(0, 1).to(output.dtype)
            if state.canary is not None and state.canary.fires:
                state.canary.kept[i] = q
        return output


def _attend_chunks(
    rows: list[Tensor], part: Chunks, view: StoreView, basis: ReadBasis, itself: Itself, to: Tensor
) -> None:
    """Attention of parts of prompts; rows of q, k and v, and the output, are ``[tokens, H, D]``."""
    q, k, v = rows
    if part.groups:
        fits = to.is_contiguous() and to.dtype == q.dtype
        out, _, lse = attend_groups(q, view, basis, (k, v), part.groups, itself=itself, out=to if fits else None)
        if basis.sinks is not None:
            found = AttentionOutput(out[None], lse[None], lse[None])
            out = found.with_sinks(basis.sinks).out[0]
        if out is not to:
            to.copy_(out)
        return
    for b, own in enumerate(zip(*(x.split(part.counts) for x in (q, k, v, to)))):
        q_b, k_b, v_b = (x.transpose(0, 1)[None] for x in own[:3])
        own[3].copy_(attend(q_b, view.only(b), basis, (k_b, v_b)).out[0])


def _by_row(x: Tensor, part: Part) -> Tensor:
    """Rows ``[tokens, H, D]`` of a part as ``[B, H, T, D]``."""
    return x[part.tokens].unflatten(0, (-1, part.queries)).transpose(1, 2)
