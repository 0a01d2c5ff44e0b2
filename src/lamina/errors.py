"""The errors Lamina raises. Every message says what was wrong, where, and what to do about it."""


class LaminaError(Exception):
    """Base of every error that Lamina raises on purpose."""


class ConfigError(LaminaError, ValueError):
    """A setting has a value that cannot work."""


class DataError(LaminaError, ValueError):
    """A text file or data set cannot be read or holds too little text."""


class ProfileError(LaminaError, ValueError):
    """A profile is damaged, incomplete, or belongs to another model."""


class UnsupportedModelError(LaminaError, ValueError):
    """The model has a part that Lamina cannot serve."""


class NonFiniteError(LaminaError, ValueError):
    """A key or value row holds NaN or Inf."""


class CacheStateError(LaminaError, RuntimeError):
    """The cache was used in an order, or with inputs, that would lose or mix up rows."""


class MemoryBudgetError(LaminaError, MemoryError):
    """``max_bytes`` cannot hold the cache even after every plane that may be shed is gone."""
