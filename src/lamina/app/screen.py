"""Where a command writes: results on stdout, progress and remarks on stderr."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining
from rich.text import Text

from lamina.errors import ConfigError
from lamina.json_values import finite


class Screen:
    """The two streams of a command.

    Progress is drawn on a terminal only; elsewhere each slow step is one line, so that logs stay readable.
    """

    def __init__(self) -> None:
        self.out = Console()
        self.err = Console(stderr=True)

    def show(self, *parts: RenderableType) -> None:
        """Print tables or text on stdout; strings are taken literally."""
        for part in parts:
            self.out.print(Text(part) if isinstance(part, str) else part, soft_wrap=isinstance(part, str))

    def publish(self, document: Any, to: str | bool | None, *parts: RenderableType) -> None:
        """Show ``parts``; with a path also write ``document`` as JSON there, with ``-`` or True the document alone."""
        path = "-" if to is True else to
        if path:
            self.json(document, path)
        if path != "-":
            self.show(*parts)

    def write(self, text: str) -> None:
        """Write a piece of streamed text on stdout at once, as it is."""
        self.out.file.write(text)
        self.out.file.flush()

    def remark(self, text: str, style: str = "") -> None:
        """Print a line on stderr."""
        self.err.print(Text(text, style=style), soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning on stderr."""
        self.remark(text, "yellow")

    def json(self, document: Any, path: str = "-") -> None:
        """Write a JSON document to a file, or to stdout for ``-``; NaN and infinities become null."""
        text = json.dumps(finite(document), indent=2) + "\n"
        if path == "-":
            self.write(text)
            return
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error}. Name a file in a folder that can be written.") from error

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a bar while something counts up to ``total``; yields the function to call with the count."""
        with self._drawing(what, BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), Remaining()) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, completed=done)

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Show that something of unknown length goes on."""
        with self._drawing(what, TimeElapsedColumn()) as bar:
            bar.add_task(what, total=None)
            yield

    @contextmanager
    def _drawing(self, what: str, *columns: Any) -> Iterator[Progress]:
        if not self.err.is_terminal:
            self.remark(what)
        described = TextColumn("{task.description}", markup=False)
        with Progress(
            SpinnerColumn(), described, *columns, console=self.err, transient=True, disable=not self.err.is_terminal
        ) as bar:
            yield bar
