"""The threshold tau and how it follows the context."""

import math


def sqrt_tau(tau0: float, context: int, tau_context: int) -> float:
    """tau0 sqrt(L / L0), at least tau0: 0.022 at 4,096 tokens is 0.124 at 131,072 (EchoKV)."""
    return tau0 * math.sqrt(max(context, tau_context) / tau_context)
