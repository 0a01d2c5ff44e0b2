"""vLLM's view of Lamina: the attention backend, what it is told of a step, and one layer's attention."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from lamina.attention.dispatch import KERNEL_QUERIES, attend
from lamina.codec import PAGE_TOKENS
from lamina.codec.gaussian import gaussian_rows
from lamina.engines.vllm.config import engine_config
from lamina.engines.vllm.state import Layer, LayerShape, WorkerState
from lamina.errors import UnsupportedModelError


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
        """Bytes of a block: a page's record."""
        layout = LayerShape(0, spec.num_kv_heads, 0, spec.head_size).layout
        content = layout.record_bytes // (spec.num_kv_heads * PAGE_TOKENS)
        return replace(spec, dtype=torch.uint8, state_content_bytes=content)


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
    """Rows of the batch that attend together, with as many queries each.

    Attributes
    ----------
    sequences : list of int
        Their sequences.
    first : int
        First token of the batch; theirs lie behind each other.
    queries : int
        Queries of each.
    """

    sequences: list[int]
    first: int
    queries: int


@dataclass
class LaminaMetadata:
    """A step: tokens without padding, and the parts of the batch.

    Attributes
    ----------
    tokens : int
        Tokens, padding left out.
    parts : list of Part
        All of them.
    fires : bool
        Whether the controller looks at this step.
    """

    tokens: int
    parts: list[Part]
    fires: bool


class LaminaBuilder(AttentionMetadataBuilder[LaminaMetadata]):
    """Tells which sequence every row of a step's batch belongs to."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.impl: LaminaImpl = next(
            iter(get_layers_from_vllm_config(vllm_config, Attention, layer_names).values())
        ).impl

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LaminaMetadata:
        """Find the parts of a step."""
        c, state = common_attn_metadata, self.impl.state
        starts = c.query_start_loc_cpu.tolist()
        counts = c.query_start_loc_cpu.diff()[: c.num_reqs]
        first = c.seq_lens[: c.num_reqs].to(torch.long) - counts
        # Rows without a token may be as long as the table.
        at = (first // PAGE_TOKENS).clamp(max=c.block_table_tensor.shape[1] - 1)
        blocks = c.block_table_tensor[: c.num_reqs].gather(1, at[:, None])[:, 0].tolist()
        writers = state.writers()
        parts: list[Part] = []
        for row, n in enumerate(counts.tolist()):
            if n == 0:
                continue
            sequence = writers.get(blocks[row], -1)
            if sequence < 0 or state.length(sequence) != int(first[row]):
                raise RuntimeError(f"no request of this step writes token {int(first[row])} to block {blocks[row]}")
            last = parts[-1] if parts else None
            if last is not None and last.queries == n <= KERNEL_QUERIES:
                last.sequences.append(sequence)
            else:
                parts.append(Part([sequence], starts[row], n))
        decoding = bool(parts) and all(p.queries <= KERNEL_QUERIES for p in parts)
        control = state.control
        fires = decoding and control is not None and control.looks(control.layers[0], max(p.queries for p in parts))
        return LaminaMetadata(starts[c.num_reqs], parts, fires)


class LaminaImpl(AttentionImpl[LaminaMetadata]):
    """One layer's attention.

    Attributes
    ----------
    state, layer : WorkerState, Layer
        Where its pages are; set once vLLM's blocks are there.
    """

    state: WorkerState
    layer: Layer

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
        if engine_config(get_current_vllm_config().additional_config) is None:
            raise UnsupportedModelError(
                "the attention backend is Lamina's, but it is not configured: give "
                '--additional-config \'{"lamina": {"profile": PATH}}\''
            )

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: LaminaMetadata | None, output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Store a step's rows ``[tokens, H, D]`` and attend from its queries."""
        if attn_metadata is None:
            return output.zero_()
        store, encoder = self.layer.store, self.layer.encoder
        n = attn_metadata.tokens
        k, v = key[:n], value[:n]
        rows = [(k[:0].transpose(0, 1), v[:0].transpose(0, 1))] * len(store.sequences)
        for part in attn_metadata.parts:
            for i, sequence in enumerate(part.sequences):
                at = slice(part.first + i * part.queries, part.first + (i + 1) * part.queries)
                rows[sequence] = k[at].transpose(0, 1), v[at].transpose(0, 1)
        store.append_rows(rows, (k, v))
        view = store.view()
        control = self.state.control if attn_metadata.fires else None
        wants = control is not None and control.wants_spread
        spread = gaussian_rows(self.state.codec, self.head_size) if wants else None
        basis = replace(self.layer.basis, softcap=self.softcap, sinks=self.sinks, rows=spread)
        for part in attn_metadata.parts:
            at = slice(part.first, part.first + len(part.sequences) * part.queries)
            q, *chunk = (x[at].unflatten(0, (-1, part.queries)).transpose(1, 2) for x in (query, key, value))
            result = attend(q, view.of(part.sequences), basis, (chunk[0], chunk[1]))
            output[at] = result.out.flatten(0, 1).to(output.dtype)
            if control is not None and part is attn_metadata.parts[0]:
                control.attended(self.layer.shape.index, q, store, encoder, basis, result)
        return output
