"""Reads a trace (docs/trace.md) in one pass, keeping what its page shows and no more."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lamina.codec import TIERS
from lamina.control.trace import FORMAT, FORMAT_VERSION
from lamina.errors import DataError

Pairs = list[tuple[int, int]]
"""Bits of K and V, one pair a packed layer."""


@dataclass(frozen=True)
class Start:
    """What the cache was when the trace began; fields as in the file."""

    lamina: str
    model: str
    layers: list[int]
    kv_heads: list[int]
    head_dims: list[int]
    page_tokens: int
    window: dict[str, int]
    controller: dict[str, Any] | None
    tiers: Pairs
    max_bytes: int | None

    @property
    def sizes(self) -> list[int]:
        """Elements of a token's K (and of its V) in each packed layer."""
        return [heads * dim for heads, dim in zip(self.kv_heads, self.head_dims)]


@dataclass(frozen=True)
class Spread:
    """Median and range over layers."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class Decision:
    """A firing.

    Attributes
    ----------
    seconds, step, context, tau, tiers
        As in the file.
    drift : (Spread or None, Spread or None)
        Smoothed signals of K and of V at the tiers that were chosen; None where no layer has one.
    """

    seconds: float
    step: int
    context: int
    tau: float | None
    tiers: Pairs
    drift: tuple[Spread | None, Spread | None]


@dataclass(frozen=True)
class MemoryUse:
    """What the cache took at one time; bits are None where nothing is stored yet."""

    seconds: float
    tokens: int
    n_bytes: int
    kinds: dict[str, int]
    bits_history: float | None
    bits_at_context: float | None
    planes_shed: int
    exact_shed: int = 0

    @property
    def bf16_bytes(self) -> float | None:
        """What the same tokens take in bfloat16, from bits and bytes; layers that are not packed stay as they are."""
        host = self.kinds.get("host_layers", 0)
        return 16 * (self.n_bytes - host) / self.bits_at_context + host if self.bits_at_context else None


@dataclass
class Run:
    """A trace that was read.

    Attributes
    ----------
    start : Start
        What the cache was.
    firings, memory : list
        In the order of the file.
    pages : dict
        Layer -> first position -> bits that the page holds of K and V now; 0 where the trace does not tell.
    closed : int
        Pages that were encoded, once for every time.
    shed : Counter
        Planes dropped, by side (``k``, ``v``), and pages that lost their exact rows (``exact``).
    inexact : dict
        Layer -> first positions of those pages.
    rewritten : bool
        Whether pages were closed at positions where one was closed already, by another sequence or a later run.
    context : int
        Tokens of the longest sequence, as last told.
    seconds : float
        Of the last event.
    ended : bool
        Whether the trace was closed in order.
    cut_line : int or None
        Number of a last line that was cut short, and left out.
    """

    start: Start
    firings: list[Decision] = field(default_factory=list)
    memory: list[MemoryUse] = field(default_factory=list)
    pages: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    closed: int = 0
    shed: Counter[str] = field(default_factory=Counter)
    inexact: dict[int, set[int]] = field(default_factory=dict)
    rewritten: bool = False
    context: int = 0
    seconds: float = 0.0
    ended: bool = False
    cut_line: int | None = None


def read_trace(path: Path) -> Run:
    """Read a trace.

    Raises
    ------
    DataError
        If the file cannot be read, is no trace, or has a damaged line, which is named. A last line that was cut short
        is left out.
    """
    run: Run | None = None
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    event = json.loads(line)
                except (ValueError, RecursionError) as error:
                    if run is not None and not line.endswith(b"\n"):
                        run.cut_line = number
                        break
                    raise DataError(_damaged(path, number, "it is no JSON")) from error
                try:
                    run = _first(event) if run is None else _next(run, event)
                except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
                    what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
                    raise DataError(_damaged(path, number, what)) from error
    except OSError as error:
        raise DataError(f"cannot read the trace {path}: {error}") from error
    if run is None:
        raise DataError(f"the trace {path} is empty; was it written by `lamina generate --trace` or lamina.Trace?")
    return run


def _damaged(path: Path, number: int, what: str) -> str:
    hint = "this is no trace of this version of Lamina" if number == 1 else "the trace is damaged"
    return f"{path}, line {number}: {what}; {hint}"


def _first(event: dict[str, Any]) -> Run:
    """The start event."""
    if not isinstance(event, dict) or event.get("event") != "start" or event.get("format") != FORMAT:
        raise ValueError(f"a trace begins with a start event of the format {FORMAT}")
    if event["version"] != FORMAT_VERSION:
        raise ValueError(f"version {event['version']} is not {FORMAT_VERSION}, which is what can be read")
    layers = _whole(event["layers"])
    start = Start(
        lamina=str(event["lamina"]),
        model=str(event["model"]),
        layers=layers,
        kv_heads=_whole(event["kv_heads"], len(layers)),
        head_dims=_whole(event["head_dims"], len(layers)),
        page_tokens=_positive(event["page_tokens"]),
        window={name: int(event["window"][name]) for name in ("sink", "recent", "rollback")},
        controller=None if event["controller"] is None else dict(event["controller"]),
        tiers=_pairs(event["tiers"], len(layers)),
        max_bytes=None if event["max_bytes"] is None else int(event["max_bytes"]),
    )
    if not layers or len(set(layers)) < len(layers):
        raise ValueError("no layer is packed, or one is named twice")
    if min(start.sizes) < 1:
        raise ValueError("a layer has no heads or no channels")
    return Run(start, pages={layer: {} for layer in layers}, seconds=float(event["seconds"]))


def _next(run: Run, event: dict[str, Any]) -> Run:
    """Take in one more event."""
    known = {"firing": _firing, "closed": _closed, "shed": _shed, "memory": _memory, "end": _end}
    name = event["event"] if isinstance(event, dict) else None
    if name not in known:
        raise ValueError(f"the event {name!r} is none of {', '.join(known)}")
    if run.ended:
        raise ValueError(f"the event {name!r} comes after the end")
    run.seconds = float(event["seconds"])
    known[name](run, event)
    return run


def _firing(run: Run, event: dict[str, Any]) -> None:
    if run.start.controller is None:
        raise ValueError("a firing without a controller")
    tiers = _pairs(event["tiers"], len(run.start.layers))
    if len(event["ema"]) != 2 * len(tiers):
        raise ValueError(f"{len(event['ema'])} smoothed signals do not fit {len(tiers)} layers")
    drift = (_spread(event["ema"], tiers, 0), _spread(event["ema"], tiers, 1))
    run.context = int(event["context"])
    run.firings.append(Decision(run.seconds, int(event["step"]), run.context, _number(event["tau"]), tiers, drift))


def _spread(ema: list[list[float | None]], tiers: Pairs, side: int) -> Spread | None:
    """Over the layers' signals of one side, each at its chosen tier."""
    rows = ((row, pair[side]) for row, pair in zip(ema[side::2], tiers))
    found = [row[TIERS.index(bits)] for row, bits in rows if row]
    known = [value for value in found if value is not None and math.isfinite(value)]
    return Spread(min(known), median(known), max(known)) if known else None


def _closed(run: Run, event: dict[str, Any]) -> None:
    starts, ((k, v),) = _whole(event["starts"]), _pairs([event["tier"]], 1)
    pages = _pages(run, event)
    run.rewritten |= len(set(starts)) < len(starts) or not pages.keys().isdisjoint(starts)
    pages.update({start: [k, v] for start in starts})
    run.inexact.get(event["layer"], set()).difference_update(starts)
    run.closed += len(starts)
    run.context = max([run.context, *(start + run.start.page_tokens for start in starts)])


def _shed(run: Run, event: dict[str, Any]) -> None:
    run.shed[event["side"]] += 1
    if event["side"] == "exact":
        _pairs([event["bits"]], 1)
        _pages(run, event)
        run.inexact.setdefault(event["layer"], set()).add(int(event["start"]))
        return
    side = "kv".index(event["side"])
    _pages(run, event).setdefault(int(event["start"]), [0, 0])[side] = _bits(event["bits"])


def _memory(run: Run, event: dict[str, Any]) -> None:
    kinds = {str(kind): int(n_bytes) for kind, n_bytes in event["kinds"].items()}
    run.memory.append(
        MemoryUse(
            run.seconds, int(event["tokens"]), int(event["bytes"]), kinds,
            _number(event["bits_history"]), _number(event["bits_at_context"]), int(event["planes_shed"]),
            int(event["exact_shed"]),
        )
    )  # fmt: skip
    run.context = run.memory[-1].tokens
    for layer, pages in run.pages.items():
        if any(start >= run.context for start in pages):
            run.pages[layer] = {start: bits for start, bits in pages.items() if start < run.context}


def _end(run: Run, event: dict[str, Any]) -> None:
    run.ended = True


def _pages(run: Run, event: dict[str, Any]) -> dict[int, list[int]]:
    if event["layer"] not in run.pages:
        raise ValueError(f"layer {event['layer']} is none of the packed layers")
    return run.pages[event["layer"]]


def _pairs(value: Sequence[Sequence[int]], n: int) -> Pairs:
    if len(value) != n:
        raise ValueError(f"tiers of {len(value)} layers, not of {n}")
    return [(_bits(k), _bits(v)) for k, v in value]


def _bits(value: int) -> int:
    if value not in TIERS:
        raise ValueError(f"{value!r} bits are none of {', '.join(map(str, TIERS))}")
    return value


def _whole(value: Sequence[int], n: int | None = None) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(x, int) for x in value) or len(value) != (n or len(value)):
        raise ValueError(f"{value!r} is no list of {'' if n is None else f'{n} '}whole numbers")
    return value


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _positive(value: int) -> int:
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{value!r} is no positive whole number")
    return value


def average_bits(tiers: Pairs, sizes: Sequence[int]) -> float:
    """Average over layers and sides, weighted by the elements of a token in each layer."""
    return sum((k + v) * size for (k, v), size in zip(tiers, sizes)) / (2 * sum(sizes))


def decisions(run: Run) -> Iterator[Pairs]:
    """The tiers before the first firing, and those of each firing."""
    yield run.start.tiers
    for firing in run.firings:
        yield firing.tiers
