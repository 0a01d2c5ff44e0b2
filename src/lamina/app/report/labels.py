"""Labels of points that cover neither each other nor a point."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CHAR_WIDTH = 7.0
LINE_HEIGHT = 14.0
ASCENT = 11.0
MARKER = 6.0
GAP = 4.0
APART = 20.0
NEAR = MARKER + GAP + LINE_HEIGHT


@dataclass(frozen=True)
class Box:
    """A rectangle."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "Box") -> bool:
        """Whether the two share more than an edge."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def is_within(self, other: "Box") -> bool:
        """Whether no part is outside ``other``."""
        return (
            self.left >= other.left
            and self.right <= other.right
            and self.top >= other.top
            and self.bottom <= other.bottom
        )


@dataclass(frozen=True)
class Label:
    """A text whose baseline starts at (x, y); ``leader`` says that a line to its point is needed."""

    text: str
    x: float
    y: float
    leader: bool

    @property
    def box(self) -> Box:
        """Room that the text takes, on the safe side for system fonts of 12 pixels."""
        top = self.y - ASCENT
        return Box(self.x, top, self.x + CHAR_WIDTH * len(self.text), top + LINE_HEIGHT)


def place_labels(points: Sequence[tuple[str, float, float]], bounds: Box, others: Sequence[Box] = ()) -> list[Label]:
    """One label a point (name, x, y), each at the free place nearest to it that covers none of ``others`` either.

    A label that needs a line keeps away from other points, so that it is not taken for theirs.
    Where a picture is too full for all names, those that come last keep their first choice and may cover something.
    """
    taken = [Box(x - MARKER, y - MARKER, x + MARKER, y + MARKER) for _, x, y in points] + list(others)
    labels = []
    for i, (name, x, y) in enumerate(points):
        choices = list(_places(name, x, y, bounds))
        strange = [Box(x - APART, y - MARKER, x + APART, y + MARKER) for j, (_, x, y) in enumerate(points) if j != i]
        free = (
            c
            for c in choices
            if c.box.is_within(bounds) and not any(c.box.overlaps(b) for b in taken + strange * c.leader)
        )
        label = next(free, choices[0])
        taken.append(label.box)
        labels.append(label)
    return labels


def _places(name: str, x: float, y: float, bounds: Box) -> Iterator[Label]:
    """Beside, above and below the point, then a grid over the whole picture from near to far."""
    width, side = CHAR_WIDTH * len(name), MARKER + GAP
    middle = y + ASCENT - LINE_HEIGHT / 2
    yield Label(name, x + side, middle, False)
    yield Label(name, x - side - width, middle, False)
    yield Label(name, x - width / 2, y - side, False)
    yield Label(name, x - width / 2, y + side + ASCENT, False)
    columns = _range(bounds.left, bounds.right - width, 8)
    lines = _range(bounds.top + ASCENT, bounds.bottom - LINE_HEIGHT + ASCENT, 4)
    grid = [Label(name, left, line, True) for left in columns for line in lines]
    yield from sorted(grid, key=lambda label: _distance(label.box, x, y))


def _distance(box: Box, x: float, y: float) -> float:
    dx = max(box.left - x, 0.0, x - box.right)
    dy = max(box.top - y, 0.0, y - box.bottom)
    return dx * dx + dy * dy


def _range(low: float, high: float, step: float) -> list[float]:
    return [low + step * i for i in range(int(max(high - low, 0) // step) + 1)]
