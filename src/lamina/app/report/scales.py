"""From figures to places in a picture."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class LogScale:
    """Places the logarithms of positive values evenly between two ends of an axis.

    Attributes
    ----------
    low, high : float
        Values at the ends.
    start, end : float
        Places of the ends; ``start`` may be the larger one.
    """

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Place of a value; those outside, zero included, are put at the nearer end."""
        share = math.log(min(max(value, self.low), self.high) / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True)
class Tick:
    """A mark on an axis."""

    at: float
    text: str


def is_drawable(value: float) -> bool:
    """Whether a logarithmic axis has a place for a value: finite and positive."""
    return math.isfinite(value) and value > 0


def decades(values: Iterable[float]) -> tuple[int, int]:
    """Exponents of the powers of ten around the drawable values, the lower one below all; (-4, 0) without any."""
    drawable = [value for value in values if is_drawable(value)]
    if not drawable:
        return -4, 0
    low = math.ceil(math.log10(min(drawable)) - 1e-9) - 1
    return low, max(low + 1, math.ceil(math.log10(max(drawable)) - 1e-9))


def decade_ticks(scale: LogScale) -> list[Tick]:
    """A tick at every power of ten, at every second one if there are more than eight."""
    low, high = (round(math.log10(value)) for value in (scale.low, scale.high))
    step = 1 if high - low <= 8 else 2
    return [Tick(scale(10.0**e), decade_text(e)) for e in range(low, high + 1, step)]


def decade_text(exponent: int) -> str:
    """A power of ten as people write it: 0.001, 1, 1e-6."""
    if exponent < -5 or exponent > 4:
        return f"1e{exponent}"
    return f"{10.0**exponent:.{max(0, -exponent)}f}"


@dataclass(frozen=True)
class LinearScale:
    """Places values from zero to ``high`` evenly between two ends of an axis."""

    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Place of a value."""
        return self.start + value / self.high * (self.end - self.start)


def linear_ticks(scale: LinearScale, text: Callable[[float], str], *, binary: bool = False) -> list[Tick]:
    """At most seven ticks from zero on, at multiples of 1, 2 or 5 times a power of ten, or of a power of two."""
    least = scale.high / 6
    if binary:
        step = 2.0 ** math.ceil(math.log2(least))
    else:
        power = 10.0 ** math.floor(math.log10(least))
        step = next(power * n for n in (1, 2, 5, 10) if power * n >= least * (1 - 1e-9))
    return [Tick(scale(step * i), text(step * i)) for i in range(int(scale.high / step * (1 + 1e-9)) + 1)]
