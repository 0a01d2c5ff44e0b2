"""The threshold tau and how it follows the context and the signals."""

import math

FAST, SLOW = 0.2, 0.02
MOST = 2.0


def sqrt_tau(tau0: float, context: int, tau_context: int) -> float:
    """tau0 sqrt(L / L0), at least tau0: 0.022 at 4,096 tokens is 0.124 at 131,072 (EchoKV)."""
    return tau0 * math.sqrt(max(context, tau_context) / tau_context)


class AdaptiveTau:
    """Tightens tau when signals rise against their own long average, and relaxes it when they are calm.

    tau = tau0 * (slow / fast), within a factor of 2, where fast and slow are moving averages of the logarithm of the
    mean signal over layers.
    """

    def __init__(self) -> None:
        self.fast: float | None = None
        self.slow: float | None = None

    def update(self, level: float) -> None:
        """Take in the mean signal of one firing."""
        if level > 0:
            x = math.log(level)
            self.fast = x if self.fast is None else self.fast + FAST * (x - self.fast)
            self.slow = x if self.slow is None else self.slow + SLOW * (x - self.slow)

    @property
    def factor(self) -> float:
        """What tau is multiplied by."""
        if self.fast is None or self.slow is None:
            return 1.0
        return min(MOST, max(1 / MOST, math.exp(self.slow - self.fast)))
