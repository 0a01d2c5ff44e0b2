"""A live view of a cache while it runs: tiers by layer, bits, bytes, planes shed and firings."""

import sys
import time
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.control import strip_control_codes
from rich.live import Live
from rich.text import Text

from lamina.app.trace_reader import MemoryUse, average_bits
from lamina.app.values import format_bytes

if TYPE_CHECKING:
    from lamina.engines.hf import LaminaCache

STYLES = {2: "black on bright_blue", 4: "black on bright_green", 8: "black on bright_yellow"}
LABEL = "K "
SECONDS_A_FRAME = 0.1


class Watch:
    """Shows what a cache decides while a generation runs.

    On a terminal, the view is drawn below the text that is given to :meth:`write`. Elsewhere every firing is one line.

    Parameters
    ----------
    cache : LaminaCache
        The cache to watch, inside a ``with`` block.
    console : Console
        Where the view is drawn, such as stderr.
    out : file, optional
        Where text goes; stdout unless told. If this is a terminal and so is ``console``, both are taken to be the same
        one, and text passes through the view.

    Examples
    --------
    >>> from lamina import LaminaCache, Profile
    >>> from lamina.app.watch import Watch
    >>> from rich.console import Console
    >>> cache = LaminaCache(model, Profile.load("model.profile"))
    >>> with Watch(cache, Console(stderr=True)) as watch:
    ...     watch.write("Once upon a time")
    Once upon a time
    """

    def __init__(self, cache: "LaminaCache", console: Console, out: IO[str] | None = None) -> None:
        self.cache, self.console = cache, console
        self.out: IO[str] = out or sys.stdout
        self.sizes = [layer.n_kv_heads * layer.head_dim for layer in cache.profile.packed.values()]
        self.firings = 0
        self.unsaid = False
        self.used: MemoryUse | None = None
        self.line = ""
        self.drawn = 0.0
        self.live: Live | None = None

    def __enter__(self) -> "Watch":
        """Start to listen, and draw."""
        self.cache.listeners.append(self)
        if self.console.is_terminal:
            shared = self.out.isatty()
            self.live = Live(console=self.console, auto_refresh=False, redirect_stdout=shared)
            self.live.start()
            self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening; the last view stays on the screen."""
        if self in self.cache.listeners:
            self.cache.listeners.remove(self)
        if self.live is not None:
            if self.line:
                self._above(self.line)
                self.line = ""
            self._draw()
            self.live.stop()
            self.live = None

    def __call__(self, event: dict[str, Any]) -> None:
        """Take in an event of the cache; a ``memory`` event ends each call in which something happened."""
        if event["event"] == "firing":
            self.firings += 1
            self.unsaid = True
        elif event["event"] == "memory":
            self.used = MemoryUse(
                0.0, event["tokens"], event["bytes"], event["kinds"], event["bits_history"], event["bits_at_context"],
                event["planes_shed"], event["exact_shed"],
            )  # fmt: skip
            if self.live is not None:
                self._draw()
            elif self.unsaid:
                self.console.print(Text(f"{self.place()}: {self.figures()}"), soft_wrap=True)
            self.unsaid = False

    def write(self, text: str) -> None:
        """Show a piece of streamed text at once."""
        if self.live is None or not self.out.isatty():
            self.out.write(text)
            self.out.flush()
        else:
            *whole, line = (self.line + strip_control_codes(text.replace("\x1b", ""))).split("\n")
            for done in whole:
                self._above(done)
            self.line = line.expandtabs()
            rows = Text(self.line).wrap(self.console, self.console.width)
            for row in rows[:-1]:
                self._above(row.plain)
                self.line = self.line.removeprefix(row.plain)
        if self.live is not None and time.monotonic() - self.drawn >= SECONDS_A_FRAME:
            self._draw()

    def place(self) -> str:
        """Where the controller is; empty without one."""
        control = self.cache.controller
        return f"decode step {control.step:,}, firing {self.firings:,}" if control is not None else ""

    def figures(self) -> str:
        """Bits, bytes and planes in one line."""
        tiers, used = self._tiers(), self.used
        parts = [f"{average_bits(tiers, self.sizes):.2f} bits decided"]
        if used is not None:
            if used.bits_history is not None and used.bits_history == used.bits_history:
                parts[0] += f", {used.bits_history:.2f} in history"
            bf16 = used.bf16_bytes
            against = f" ({used.n_bytes / bf16:.0%} of bf16)" if bf16 else ""
            parts.append(f"{format_bytes(used.n_bytes)}{against}")
            parts.append(f"planes shed: {used.planes_shed:,}")
            if used.exact_shed:
                parts.append(f"exact rows of {used.exact_shed:,} pages")
        return "; ".join(parts)

    def __rich__(self) -> Group:
        """The view: the unfinished line of text, a row of cells for K and one for V, and the figures."""
        rows: list[Text] = [Text(self.line)] if self.line else []
        for side, name in enumerate("KV"):
            rows += cells([pair[side] for pair in self._tiers()], name, self.console.width)
        last = "; ".join(part for part in (self.figures(), self.place()) if part)
        return Group(*rows, Text(last, overflow="fold"))

    def _tiers(self) -> list[tuple[int, int]]:
        tiers = self.cache.tiers
        return [tiers[layer] for layer in self.cache.profile.packed]

    def _above(self, line: str) -> None:
        assert self.live is not None
        self.live.console.print(Text(line), soft_wrap=True)

    def _draw(self) -> None:
        assert self.live is not None
        self.live.update(self, refresh=True)
        self.drawn = time.monotonic()


def cells(bits: list[int], name: str, width: int) -> list[Text]:
    """One coloured digit a layer, in as many rows as the width asks for."""
    rows = []
    for i, part in enumerate(_parts(bits, max(1, width - len(LABEL) - 1))):
        row = Text(f"{name} " if i == 0 else " " * len(LABEL), no_wrap=True)
        for value in part:
            row.append(str(value), style=STYLES[value])
        rows.append(row)
    return rows


def _parts(bits: list[int], most: int) -> list[list[int]]:
    return [bits[i : i + most] for i in range(0, len(bits), most)]
