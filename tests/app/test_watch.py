"""The live view: what a firing says, what the terminal shows, and text that stays whole."""

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from lamina.app.watch import STYLES, Watch, cells

MEMORY = {
    "event": "memory",
    "tokens": 400,
    "bytes": 600_000,
    "kinds": {"codes": 500_000, "host_layers": 100_000},
    "bits_history": 3.5,
    "bits_at_context": 10.0,
    "planes_shed": 7,
    "exact_shed": 0,
}
FIRING = {"event": "firing"}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def cache_of(tiers, sizes=None, controller=True):
    sizes = sizes or [1] * len(tiers)
    layers = {i: SimpleNamespace(n_kv_heads=size, head_dim=4) for i, size in enumerate(sizes)}
    return SimpleNamespace(
        profile=SimpleNamespace(packed=layers),
        tiers=[tuple(pair) for pair in tiers],
        controller=SimpleNamespace(step=48) if controller else None,
        listeners=[],
    )


def screen(raw, width=80):
    """Lines of a terminal after everything was written to it: enough of it for what rich writes."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", raw):
        if token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token.startswith("\x1b"):
            count = int(re.sub(r"\D", "", token) or 1)
            if token.endswith("A"):
                row -= count
                assert row >= 0
            elif token.endswith("K"):
                lines[row] = ""
        else:
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            column += len(token)
            assert column <= width
    return [line.rstrip() for line in lines]


def on_terminal(cache, width=80):
    file = Terminal()
    console = Console(
        file=file, force_terminal=True, width=width, height=30, color_system="standard", legacy_windows=False
    )
    return file, Watch(cache, console, file)


def test_a_firing_is_one_line_where_there_is_no_terminal():
    cache, out = cache_of([(2, 4), (8, 2)], [3, 1]), io.StringIO()
    console = Console(file=io.StringIO(), width=40)
    with Watch(cache, console, out) as watch:
        for event in (MEMORY, FIRING, {"event": "shed"}, MEMORY, {"event": "closed"}, MEMORY):
            cache.listeners[0](event)
        watch.write("text [red]\n")
    assert console.file.getvalue() == (
        "decode step 48, firing 1: 3.50 bits decided, 3.50 in history; 586 KiB (67% of bf16); planes shed: 7\n"
    )
    assert out.getvalue() == "text [red]\n"
    assert cache.listeners == []


def test_it_stops_listening_when_the_run_fails():
    for file in (io.StringIO(), Terminal()):
        cache = cache_of([(2, 2)])
        with pytest.raises(KeyError), Watch(cache, Console(file=file, force_terminal=file.isatty()), file):
            assert len(cache.listeners) == 1
            raise KeyError
        assert cache.listeners == []


def test_a_terminal_shows_cells_and_figures_below_the_text():
    cache = cache_of([(2, 8), (4, 4), (8, 2)])
    file, watch = on_terminal(cache)
    with watch:
        watch.write("Once upon")
        cache.tiers = [(2, 4), (4, 4), (2, 2)]
        cache.listeners[0](FIRING)
        cache.listeners[0](MEMORY)
        watch.write(" a time\nthere [red]was\x1b[2J\n\nand")
    shown = screen(file.getvalue())
    assert shown[:8] == [
        "Once upon a time",
        "there [red]was[2J",
        "",
        "and",
        "K 242",
        "V 442",
        "3.00 bits decided, 3.50 in history; 586 KiB (67% of bf16); planes shed: 7;",
        "decode step 48, firing 1",
    ]
    assert not any(shown[8:])
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") == 1, "the cursor comes back"


def test_unfinished_lines_are_shown_while_they_grow():
    file, watch = on_terminal(cache_of([(2, 2)], controller=False))
    with watch:
        for piece in ("One ", "two ", "three"):
            watch.drawn = 0.0
            watch.write(piece)
        assert screen(file.getvalue())[0] == "One two three"
    assert screen(file.getvalue())[:4] == ["One two three", "K 2", "V 2", "2.00 bits decided"]


def test_long_lines_are_wrapped_and_nothing_is_lost():
    words = [f"word{i}" for i in range(60)]
    file, watch = on_terminal(cache_of([(2, 2)]), width=40)
    with watch:
        for word in words:
            watch.write(word + " ")
            assert len(watch.line) <= 41
        watch.write("日本語" * 20)
    shown = screen(file.getvalue())
    end = shown.index("K 2")
    assert " ".join(shown[:end]).replace("語 日", "語日").split()[:60] == words
    assert "".join(shown[:end]).count("語") == 20
    assert all(Text(line).cell_len <= 40 for line in shown[:end])


def test_tabs_and_control_characters_do_not_move_the_view():
    file, watch = on_terminal(cache_of([(2, 2)]), width=20)
    with watch:
        for piece in ("a\tb\r", "\x08c", "\x07\t", "long words that", "\twrap"):
            watch.write(piece)
    shown = screen(file.getvalue())
    assert " ".join(shown[: shown.index("K 2")]).split() == ["a", "bc", "long", "words", "that", "wrap"]


def test_text_of_a_redirected_stdout_stays_out_of_the_view():
    cache, out = cache_of([(2, 2)]), io.StringIO()
    console = Console(file=Terminal(), force_terminal=True, width=80, height=30)
    with Watch(cache, console, out) as watch:
        watch.write("a\x1bb")
    assert out.getvalue() == "a\x1bb"
    assert screen(console.file.getvalue())[0] == "K 2"


@pytest.mark.parametrize(("width", "rows"), [(100, [80]), (43, [40, 40]), (13, [10] * 8)])
def test_cells_wrap_and_keep_their_colors(width, rows):
    bits = [(2, 4, 8)[i % 3] for i in range(80)]
    found = cells(bits, "K", width)
    assert [len(row.plain) - 2 for row in found] == rows
    assert all(row.cell_len < width for row in found)
    assert [row.plain[:2] for row in found] == ["K "] + ["  "] * (len(rows) - 1)
    spans = [span.style for row in found for span in row.spans]
    assert spans == [STYLES[b] for b in bits]
    assert "".join(row.plain[2:] for row in found) == "".join(map(str, bits))


def test_a_real_run(traced):
    lines = traced.watched.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"decode step {16 * n}, firing {n}" for n in (1, 2, 3)]
    assert all(": 3.00 bits decided, 10.12 in history; 204 KiB (1" in line for line in lines)
    assert traced.cache.listeners == []
