"""The pages of a layer: how many bits each holds now."""

from collections.abc import Collection
from dataclasses import dataclass

from lamina.app.report.scales import LinearScale, linear_ticks
from lamina.app.report.strips import Strips, lay_out_strips
from lamina.app.trace_reader import Run
from lamina.app.trace_summary import Summary


@dataclass(frozen=True)
class LayerPages:
    """A layer's picture, None if it has no pages; ``counts`` says how many pages hold how many bits, of K and of V."""

    layer: int
    picture: Strips | None
    counts: tuple[str, str]


def chosen_layers(run: Run, summary: Summary) -> list[int]:
    """First and last packed layer, and of the others the one whose tiers changed most often."""
    layers = run.start.layers
    changed = {layer: sum(c.up + c.down for c in pair) for layer, pair in zip(layers, summary.layer_changes)}
    most = max(layers[1:-1], key=changed.__getitem__, default=layers[0])
    return [layer for layer in layers if layer in (layers[0], most, layers[-1])]


def layer_pages(run: Run, layer: int) -> LayerPages:
    """One cell a page for K and V, with the stretches that attention reads exactly."""
    size, tokens = run.start.page_tokens, run.context
    held = sorted(run.pages[layer].items())
    sides = [[(start // size, bits[side]) for start, bits in held] for side in (0, 1)]
    counts = (_count([b for _, b in sides[0]]), _count([b for _, b in sides[1]]))
    if not held:
        return LayerPages(layer, None, counts)
    width = tokens / size
    ticks = linear_ticks(LinearScale(tokens, 0, width), lambda value: f"{value:,.0f}")
    exact = [(start / size, end / size) for start, end in exact_stretches(run, run.inexact.get(layer, set()))]
    rows = [("K", sides[0]), ("V", sides[1])]
    picture = lay_out_strips(rows, width, [(t.at, t.text) for t in ticks], pitch=22.0, exact=exact)
    return LayerPages(layer, picture, counts)


def exact_stretches(run: Run, inexact: Collection[int] = ()) -> list[tuple[int, int]]:
    """Positions (from, to) that the next token reads exactly: the sink, and the recent tokens with the open page.

    Pages that start at ``inexact`` have lost their exact rows.
    """
    size, tokens, window = run.start.page_tokens, run.context, run.start.window
    sink = min(window["sink"], tokens)
    recent = max(sink, tokens // size * size - window["recent"])
    found: list[tuple[int, int]] = []
    for first, last in ((0, sink), (recent, tokens)):
        for start in range(first, last, size):
            if start in inexact:
                continue
            end = min(start + size, last)
            if start > first and found and found[-1][1] == start:
                found[-1] = (found[-1][0], end)
            else:
                found.append((start, end))
    return found


def _count(bits: list[int]) -> str:
    return ", ".join(f"{bits.count(b)} of {b or 'unknown'} bits" for b in sorted(set(bits))) or "none"
