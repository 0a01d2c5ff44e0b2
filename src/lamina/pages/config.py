"""Settings of the exact windows."""

from dataclasses import dataclass

from lamina.codec import PAGE_TOKENS
from lamina.errors import ConfigError


@dataclass(frozen=True)
class WindowConfig:
    """Which rows attention reads exactly.

    Attributes
    ----------
    sink : int
        First tokens of a sequence.
    recent : int
        Most recent tokens, on top of the page being filled.
    rollback : int
        Further tokens whose exact rows are kept, so that rolling back that far equals a fresh run.

    Examples
    --------
    >>> from lamina import WindowConfig
    >>> WindowConfig(sink=64, recent=512).exact_from(1000)  # 512 before the page of token 1000
    448
    """

    sink: int = 64
    recent: int = 256
    rollback: int = 64

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("sink", "recent", "rollback"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0 or value % PAGE_TOKENS:
                raise ConfigError(f"{name}={value!r} must be a non-negative multiple of {PAGE_TOKENS} tokens")

    def exact_from(self, position: int) -> int:
        """First recent token position that a query at ``position`` reads exactly."""
        return position // PAGE_TOKENS * PAGE_TOKENS - self.recent

    def kept_from(self, position: int) -> int:
        """First recent token position whose exact rows are kept when the next query is at ``position``."""
        return self.exact_from(position) - self.rollback
