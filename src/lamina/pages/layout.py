"""Where the fields of a closed page lie: one fixed-size record of bytes a page, K and V together."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.codec import PAGE_TOKENS

ALIGN = 16


@dataclass(frozen=True)
class RecordLayout:
    """Byte offsets of a page record's fields, for H KV heads and head dimension D.

    A record holds the base planes and all numbers of a page; a record array is a uint8 ``[N, record_bytes]`` tensor,
    its own or an engine's, whose blocks may be multiples of more than 16 bytes (``align``). Fields, in order (index 0
    is K, 1 is V):

    ============  ============  ===========================
    field         dtype         shape
    ============  ============  ===========================
    base          uint8         ``[2, H, 64, D/4]``
    scale         scale16       ``[2, H, 64]``
    mid           bfloat16      ``[2, H, 64]``
    center        int8          ``[H, D]`` (K), if ``centered``
    gain          scale16       ``[2, H, 2]``
    center_scale  scale16       ``[H]``, if ``centered``
    ============  ============  ===========================
    """

    n_heads: int
    head_dim: int
    centered: bool = True
    align: int = ALIGN

    @property
    def slab_bytes(self) -> int:
        """Bytes of one slab (base plane of one side): one arena slot."""
        return self.n_heads * PAGE_TOKENS * self.head_dim // 4

    @property
    def scale_offset(self) -> int:
        """Offset of ``scale``."""
        return 2 * self.slab_bytes

    @property
    def mid_offset(self) -> int:
        """Offset of ``mid``."""
        return self.scale_offset + 4 * self.n_heads * PAGE_TOKENS

    @property
    def center_offset(self) -> int:
        """Offset of ``center``."""
        return self.mid_offset + 4 * self.n_heads * PAGE_TOKENS

    @property
    def gain_offset(self) -> int:
        """Offset of ``gain``."""
        return self.center_offset + self.n_heads * self.head_dim * self.centered

    @property
    def center_scale_offset(self) -> int:
        """Offset of ``center_scale``."""
        return self.gain_offset + 8 * self.n_heads

    @property
    def record_bytes(self) -> int:
        """Bytes of a record, a multiple of ``align``."""
        return -(-(self.center_scale_offset + 2 * self.n_heads * self.centered) // self.align) * self.align

    def views(self, records: Tensor) -> "Records":
        """Typed views of a contiguous uint8 ``[N, record_bytes]`` tensor."""
        h, d, n = self.n_heads, self.head_dim, records.shape[0]

        def field(offset: int, dtype: torch.dtype, *shape: int) -> Tensor:
            typed = records.view(dtype)
            strides = [1]
            for size in reversed(shape[1:]):
                strides.insert(0, strides[0] * size)
            start = records.storage_offset() // dtype.itemsize + offset // dtype.itemsize
            return typed.as_strided((n, *shape), (typed.shape[1], *strides), start)

        return Records(
            base=field(0, torch.uint8, 2, h, PAGE_TOKENS, d // 4),
            scale=field(self.scale_offset, torch.int16, 2, h, PAGE_TOKENS),
            mid=field(self.mid_offset, torch.bfloat16, 2, h, PAGE_TOKENS),
            center=field(self.center_offset, torch.int8, h, d) if self.centered else None,
            gain=field(self.gain_offset, torch.int16, 2, h, 2),
            center_scale=field(self.center_scale_offset, torch.int16, h) if self.centered else None,
        )


@dataclass
class Records:
    """Typed views of N page records, see :class:`RecordLayout`."""

    base: Tensor
    scale: Tensor
    mid: Tensor
    center: Tensor | None
    gain: Tensor
    center_scale: Tensor | None
