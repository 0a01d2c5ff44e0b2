"""A trace: what a cache decided, closed and dropped, as JSON lines (schema: docs/trace.md)."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lamina import __version__
from lamina.codec import PAGE_TOKENS
from lamina.errors import ConfigError
from lamina.json_values import finite

if TYPE_CHECKING:
    from lamina.engines.hf import LaminaCache

FORMAT = "lamina-trace"
FORMAT_VERSION = 1


class Trace:
    """Writes everything that happens in a cache to a file, one JSON object a line.

    Parameters
    ----------
    path : Path or str
        The file; one that is there is replaced.
    cache : LaminaCache
        The cache to watch, from now on.

    Examples
    --------
    >>> from lamina import ControllerConfig, LaminaCache, Profile, Trace
    >>> cache = LaminaCache(model, Profile.load("model.profile"), controller=ControllerConfig())
    >>> with Trace("run.jsonl", cache):
    ...     output = model.generate(**inputs, max_new_tokens=70, cache=cache)
    """

    def __init__(self, path: Path | str, cache: "LaminaCache") -> None:
        try:
            self.file: IO[str] = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"cannot write the trace {path}: {error}; name a file in a folder of yours") from error
        self.cache = cache
        self.began = time.monotonic()
        self(start_event(cache))
        cache.listeners.append(self)

    def __call__(self, event: dict[str, Any]) -> None:
        """Write one event."""
        seconds = round(time.monotonic() - self.began, 3)
        self.file.write(json.dumps(finite({"event": event["event"], "seconds": seconds, **event})) + "\n")

    def close(self) -> None:
        """Stop watching and close the file."""
        if self in self.cache.listeners:
            self.cache.listeners.remove(self)
            self({"event": "end"})
        self.file.close()

    def __enter__(self) -> "Trace":
        """Already open."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close; the trace of a run that failed has no end."""
        if kind is not None and self in self.cache.listeners:
            self.cache.listeners.remove(self)
        self.close()


def start_event(cache: "LaminaCache") -> dict[str, Any]:
    """The first line of a trace: what the cache is."""
    layers = cache.profile.packed
    return {
        "event": "start",
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "lamina": __version__,
        "model": cache.profile.model_id,
        "layers": list(layers),
        "kv_heads": [layer.n_kv_heads for layer in layers.values()],
        "head_dims": [layer.head_dim for layer in layers.values()],
        "page_tokens": PAGE_TOKENS,
        "window": asdict(cache.window),
        "controller": None if cache.controller is None else asdict(cache.controller.config),
        "tiers": [list(cache.tiers[i]) for i in layers],
        "max_bytes": cache.budget.max_bytes,
    }
