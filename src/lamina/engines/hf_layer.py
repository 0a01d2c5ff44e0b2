"""One full-attention layer of a LaminaCache, and the attention function that reads it."""

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import sdpa_mask

from lamina.attention.dispatch import attend, page_writer
from lamina.attention.types import AttentionOutput, ReadBasis
from lamina.basis.encoder import PageEncoder
from lamina.basis.host_attention import host_attention
from lamina.codec.gaussian import gaussian_rows
from lamina.control.live import LiveControl
from lamina.errors import CacheStateError, UnsupportedModelError
from lamina.pages import Budget, LayerStore
from lamina.pages.store import Cut

if TYPE_CHECKING:
    from lamina.engines.hf import LaminaCache

ATTENTION = "lamina"
HANDLE = "lamina_layer"


class LaminaLayer(CacheLayerMixin):
    """One layer of a :class:`LaminaCache`.

    ``update`` returns the rows it was given with this layer attached to the keys; the attention function finds it
    there, stores the rows that are not padding, and reads the pages.

    Attributes
    ----------
    seen : int
        Tokens given so far, padding included.
    pending : int
        Those of them that attention has not been asked for yet.
    """

    is_compileable = False
    is_sliding = False
    is_croppable = True

    def __init__(self, cache: "LaminaCache", index: int) -> None:
        super().__init__()
        self.cache = weakref.proxy(cache)
        self.index = index
        self.store: Any = None
        self.encoder: Any = None
        self.basis: Any = None
        self.seen = self.pending = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Create the page store, now that dtype and device are known."""
        self.make_store(key_states.dtype, key_states.device)

    def make_store(self, dtype: torch.dtype, device: torch.device) -> None:
        """Create the page store."""
        cache, i = self.cache, self.index
        profile = cache.profile.layers[i]
        self.encoder = encoder = PageEncoder(profile, cache.codec, cache.scaling[i], device)
        self.store = self._empty_store(dtype, device, page_writer(encoder, dtype), cache.budget)
        self.basis = ReadBasis(encoder.q_forward, encoder.v_back, encoder.mean_v, encoder.kappa, encoder.scaling)
        self.is_initialized = True

    def _empty_store(self, dtype: torch.dtype, device: torch.device | str, writer: Any, budget: Budget) -> LayerStore:
        cache, i = self.cache, self.index
        profile = cache.profile.layers[i]
        return LayerStore(
            profile.n_kv_heads, profile.head_dim, dtype, device, window=cache.window, writer=writer,
            tiers=lambda: cache.tiers[i], budget=budget, centered=cache.codec.center, name=f"layer {i}",
            on_close=lambda starts, bits, missed: cache.closed(i, starts, bits, missed),
        )  # fmt: skip

    def append_bytes(self, tokens: list[int], cut: Cut, dtype: torch.dtype) -> int:
        """Bytes that appending so many rows to each sequence must allocate, whether there is a store yet or not."""
        store = self.store
        if store is None:
            store = self._empty_store(dtype, "cpu", None, Budget())
        return store.append_bytes(tokens, cut)

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Announce rows ``[B, H, T, D]``; returns them with this layer attached."""
        if self.cache.step is not None:
            return self._marked(key_states, value_states)
        self.cache.check_state(self.index, key_states.shape[2])
        key_states, value_states = key_states.detach(), value_states.detach()
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        self.pending = key_states.shape[2]
        self.seen += self.pending
        return self._marked(key_states, value_states)

    def _marked(self, *rows: Tensor) -> Any:
        for x in rows:
            setattr(x, HANDLE, self)
        return rows

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        """Store rows that are pending, and attend: ``[B, T, Hq, D]``, zero for padding, without gradient."""
        batch, _, tokens, _ = key.shape
        before = self.seen - tokens
        padding = self.cache.padding
        real = padding.step(mask, batch, before, tokens)
        control: LiveControl | None = None
        if self.pending:
            if self.index == self.cache.ours[0].index:
                if tokens > 1:
                    self.cache.check_positions(kwargs.get("position_ids"), real)
                self.cache.make_room(real, batch, before, tokens, key.dtype)
            self.store.append(key, value, real, self.cache.cut)
            self.pending = 0
            padding.grow(real, batch, before, tokens)
            control = self.cache.control if real is None else None
        if max(padding.lengths(batch, before)) == 0:
            # Real tokens attend to this chunk alone, which is the model's own attention; what came before is padding.
            own = mask if mask is None else mask[..., before:]
            self.cache.finished(self.index)
            return host_attention(module, query.detach(), key, value, own, **kwargs)[0]
        if control is not None and not control.looks(self.index, tokens):
            control = None
        rows = None
        if control is not None and control.wants_spread:
            rows = gaussian_rows(self.cache.codec, key.shape[-1])
        basis = replace(self.basis, softcap=kwargs.get("softcap") or 0.0, sinks=kwargs.get("s_aux"), rows=rows)
        query = query.detach()
        if real is None:
            result = self.read(query, basis, (key, value), None)
            out = result.out
            if control is not None:
                control.attended(self.index, query, self.store, self.encoder, basis, result)
        else:
            out = query.new_zeros(batch, tokens, query.shape[1], value.shape[-1])
            for b in [b for b in range(batch) if bool(real[b].any())]:
                at, row = real[b].to(query.device), slice(b, b + 1)
                chunk = key[row, :, at], value[row, :, at]
                out[b, at] = self.read(query[row, :, at], basis, chunk, b).out[0]
        if tokens > 1 and not self.cache.geometry.shares_kv:
            self.store.settle()
        self.cache.finished(self.index)
        return out

    def take(self, key: Tensor, value: Tensor) -> None:
        """Store rows ``[B, H, T, D]`` that attention read elsewhere, as those of a first call; none is padding."""
        self.lazy_initialization(key, value)
        self.store.append(key, value)
        self.seen += key.shape[2]
        if not self.cache.geometry.shares_kv:
            self.store.settle()

    def read(self, query: Tensor, basis: ReadBasis, chunk: tuple[Tensor, Tensor], only: int | None) -> AttentionOutput:
        """Attention over the pages of all sequences, or of one alone."""
        view = self.store.view()
        return attend(query, view if only is None else view.only(only), basis, chunk)

    def withdraw(self) -> None:
        """Forget rows that were announced but never stored."""
        self.seen -= self.pending
        self.pending = 0

    @property
    def scaling(self) -> float:
        """Factor on q.k."""
        return self.basis.scaling

    @property
    def batch_size(self) -> int:
        """Sequences."""
        return len(self.store.sequences) if self.store is not None else 0

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns."""
        self.withdraw()
        if self.store is not None and tokens_to_remove:
            target = self.seen + tokens_to_remove
            self.store.crop(self.cache.padding.lengths(self.batch_size, target))
            self.seen = target

    def reset(self) -> None:
        """Forget everything."""
        self.seen = self.pending = 0
        if self.store is not None:
            self.store.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the batch of the sequences ``beam_idx``."""
        if self.store is not None:
            self.store.select(beam_idx.tolist())


@torch.compiler.disable
def lamina_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function registered with transformers under ``"lamina"``.

    Rows that come from a :class:`LaminaCache` are read from its pages; any other call is the model's own attention.
    """
    layer: Any = getattr(key, HANDLE, None)
    if layer is None:
        return host_attention(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    try:
        stored_by: Any = getattr(value, HANDLE, None)
        if stored_by is not layer:
            raise UnsupportedModelError(f"layer {layer.index} attends to other values than those it stores")
        _check_call(layer, scaling, dropout, kwargs)
        if layer.cache.step is not None:
            return layer.cache.step.attend(layer, query, key, value, **kwargs), None
        return layer.attend(module, query, key, value, attention_mask, scaling=scaling, **kwargs), None
    except BaseException:
        layer.withdraw()
        raise


def _check_call(layer: LaminaLayer, scaling: float | None, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse what packed attention does not do."""
    for name in ("sliding_window", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"layer {layer.index}: attention with {name!r} cannot read a packed cache")
    if dropout:
        raise CacheStateError(f"layer {layer.index}: attention dropout {dropout}; call model.eval() first")
    if scaling is not None and abs(scaling - layer.scaling) > 1e-6 * abs(scaling):
        raise UnsupportedModelError(f"layer {layer.index}: logits are scaled by {scaling}, not {layer.scaling}")


AttentionInterface.register(ATTENTION, lamina_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
