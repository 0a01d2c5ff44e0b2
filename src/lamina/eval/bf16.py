"""The exact baseline: keys and values in bfloat16, as engines keep them."""

from typing import Any

from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lamina.basis.geometry import model_geometry
from lamina.engines.host_layers import host_layers, n_bytes, tensors_of


class Bf16Layer(DynamicLayer):
    """Rows rounded to bfloat16, whatever the model computes in."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store and return all rows."""
        dtype = key_states.dtype
        return super().update(key_states.bfloat16().to(dtype), value_states.bfloat16().to(dtype), *args, **kwargs)


class Bf16Cache(Cache):
    """The exact baseline: 16 bits an element."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.geometry = model_geometry(model.config)
        layers = host_layers(model.config.get_text_config(decoder=True))
        for i in self.geometry.packed:
            layers[i] = Bf16Layer()
        self.layers: list[Any] = []
        super().__init__(layers=layers)

    def bits(self) -> dict[str, float]:
        """16 bits, windows or not."""
        return {"history": 16.0, "context": 16.0}

    @property
    def average_tier(self) -> float:
        """16 bits."""
        return 16.0

    def memory(self) -> dict[str, int]:
        """Bytes that bfloat16 rows take."""
        rows = [t for layer in self.layers if isinstance(layer, Bf16Layer) for t in tensors_of(layer).values()]
        others = [layer for layer in self.layers if not isinstance(layer, Bf16Layer)]
        total = {"rows": sum(2 * t.numel() for t in rows)}
        return total | {"host_layers": sum(map(n_bytes, others))} if others else total
