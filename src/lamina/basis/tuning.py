"""What tuning learnt about a model, kept in its profile: what drift in each layer means for the model's output."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tuning:
    """Weights and settings of a live controller, see :mod:`lamina.eval.tuning`. Lists count the packed layers.

    Attributes
    ----------
    weights : list of (float, float)
        KL of the model's next-token distribution, in nats, per unit of the ``anchored`` signal of K and of V.
    drift : list of list of float
        One row a layer and side (K, V alternating): KL of the output that 2, 4 and 8 bits cost on the tuning text.
    settings : dict
        Fields of a :class:`lamina.control.config.ControllerConfig` that meets the goal.
    measured : dict
        The goal, and what a run with these settings showed.
    """

    weights: list[tuple[float, float]]
    drift: list[list[float]]
    settings: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Any, n_layers: int) -> "Tuning":
        """Inverse of :meth:`as_json`; ValueError says what is wrong."""
        if not isinstance(found, Mapping):
            raise ValueError("it is no mapping")
        weights, drift = _rows(found.get("weights"), n_layers, 2), _rows(found.get("drift"), 2 * n_layers, 3)
        settings, measured = found.get("settings", {}), found.get("measured", {})
        if not isinstance(settings, Mapping) or not isinstance(measured, Mapping):
            raise ValueError("its settings or measured are no mapping")
        return cls([(k, v) for k, v in weights], drift, dict(settings), dict(measured))


def _rows(found: Any, n: int, width: int) -> list[list[float]]:
    """Checked lists of non-negative numbers."""
    if not isinstance(found, Sequence) or len(found) != n:
        raise ValueError(f"there are not {n} rows")
    rows = [[float(x) for x in row] for row in found]
    if any(len(row) != width or not all(0 <= x < float("inf") for x in row) for row in rows):
        raise ValueError(f"a row is not {width} numbers of at least 0")
    return rows
