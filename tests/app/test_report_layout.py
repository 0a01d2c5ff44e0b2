"""Pictures of the report: places follow figures, and labels cover nothing."""

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.app.report.columns import PLOT as COLUMN_PLOT
from lamina.app.report.columns import Series, lay_out_columns
from lamina.app.report.labels import MARKER, Box, place_labels
from lamina.app.report.scales import LogScale, decade_text, decade_ticks, decades
from lamina.app.report.scatter import PLOT, lay_out_scatter
from lamina.app.report.stacks import lay_out_stacks
from lamina.eval.arms import ARMS

NAN = float("nan")


def test_a_logarithmic_scale_gives_every_decade_the_same_room():
    scale = LogScale(1e-3, 1.0, 300, 0)
    assert [scale(v) for v in (1e-3, 1e-2, 1e-1, 1.0)] == pytest.approx([300, 200, 100, 0])
    assert scale(2e-2) - scale(2e-1) == pytest.approx(100)
    assert (scale(0.0), scale(50.0)) == (300, 0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.02, 0.5], (-2, 0)),
        ([0.01, 1.0], (-3, 0)),
        ([7e-5], (-5, -4)),
        ([1.0], (-1, 0)),
        ([NAN, math.inf, 0.0], (-4, 0)),
        ([], (-4, 0)),
    ],
)
def test_decades_leave_room_below_the_least_value(values, expected):
    assert decades(values) == expected


def test_tick_texts():
    assert [decade_text(e) for e in (-6, -5, -2, 0, 2, 5)] == ["1e-6", "0.00001", "0.01", "1", "100", "1e5"]
    assert [t.text for t in decade_ticks(LogScale(1e-3, 1.0, 0, 1))] == ["0.001", "0.01", "0.1", "1"]
    assert len(decade_ticks(LogScale(1e-12, 1.0, 0, 1))) <= 8


def markers(points):
    return [Box(x - MARKER, y - MARKER, x + MARKER, y + MARKER) for _, x, y in points]


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(ARMS)), st.floats(70, 420), st.floats(25, 265)), min_size=1, max_size=len(ARMS)
    )
)
def test_labels_cover_neither_each_other_nor_points(points):
    boxes = [label.box for label in place_labels(points, PLOT)]
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    assert not any(box.overlaps(marker) for box in boxes for marker in markers(points))
    assert all(box.is_within(PLOT) for box in boxes)


def test_labels_of_points_in_one_place_get_leaders():
    labels = place_labels([(f"lamina-int{i}", 200, 100) for i in range(9)], PLOT)
    assert not labels[0].leader
    assert labels[-1].leader
    assert not any(a.box.overlaps(b.box) for a, b in combinations(labels, 2))


def test_a_label_lies_beside_its_point_where_there_is_room():
    (label,) = place_labels([("bf16", 200, 100)], PLOT)
    assert 200 + MARKER < label.x < 200 + 3 * MARKER
    assert label.box.top < 100 < label.box.bottom
    (label,) = place_labels([("lamina-int2", PLOT.right - 3, 100)], PLOT)
    assert label.box.right < PLOT.right - MARKER


def test_scatter_axes():
    scatter = lay_out_scatter([("bf16", 16.0, 1e-5), ("b", 4.0, 1e-3), ("c", 2.0, 1e-1)])
    x, y = ([getattr(p, axis) for p in scatter.points] for axis in "xy")
    assert x[0] - x[1] == pytest.approx(2 * (x[1] - x[2]))
    assert y[0] - y[1] == pytest.approx(y[1] - y[2]) and y[0] > y[1] > y[2]
    ticks = {t.text: t.at for t in scatter.x_ticks}
    assert [ticks["16"], ticks["4"], ticks["2"]] == pytest.approx(x)
    assert {t.text: t.at for t in scatter.y_ticks}["0.001"] == pytest.approx(y[1])
    assert all(PLOT.left < p.x < PLOT.right and PLOT.top <= p.y < PLOT.bottom for p in scatter.points)


def test_scatter_names_what_it_cannot_place():
    scatter = lay_out_scatter([("a", 16.0, 0.0), ("b", NAN, 0.1), ("c", 2.5, NAN), ("d", 2.5, 0.1), ("e", 2, math.inf)])
    assert scatter.missing == ["b", "c", "e"]
    assert [(p.name, p.at_edge) for p in scatter.points] == [("a", True), ("d", False)]
    assert scatter.points[0].y == PLOT.bottom


@pytest.mark.parametrize("arm", [("a", 2.5, 0.1), ("a", 40.0, 0.0), ("a", 0.5, 1e-9)])
def test_scatter_of_one_arm(arm):
    (point,) = lay_out_scatter([arm]).points
    assert PLOT.left < point.x < PLOT.right
    assert PLOT.top <= point.y <= PLOT.bottom


def test_bars_are_as_long_as_their_bytes():
    arms = [("bf16", {"rows": 1000}), ("small", {"codes": 100, "scales": 50, "none": 0}), ("big", {"codes": 1500})]
    stacks = lay_out_stacks(arms, 1000)
    bars = {bar.name: bar for bar in stacks.bars}
    assert stacks.kinds == ["rows", "codes", "scales"]
    unit = bars["bf16"].segments[0].width / 1000
    for name, by_kind in arms:
        assert [s.width / unit for s in bars[name].segments] == pytest.approx([n for n in by_kind.values() if n])
        assert bars[name].n_bytes == sum(by_kind.values())
    codes, scales = bars["small"].segments
    assert (codes.x, scales.x) == (stacks.left, pytest.approx(codes.x + codes.width))
    assert codes.color == bars["big"].segments[0].color != scales.color
    assert stacks.reference == pytest.approx(stacks.left + 1000 * unit)
    assert bars["big"].segments[0].width == pytest.approx(stacks.width - 2 * stacks.left)
    assert all(b.y >= a.y + stacks.bar_height for a, b in zip(stacks.bars, stacks.bars[1:]))
    assert stacks.bars[-1].y + stacks.bar_height < stacks.height


def test_no_bytes_are_no_bar():
    (bar,) = lay_out_stacks([("empty", {})], 0).bars
    assert bar.segments == []


def test_columns_share_an_axis():
    first, second = lay_out_columns([Series("a", [0.1, 0.001, NAN]), Series("b", [0.01, 0.0, 0.02])])
    height = (COLUMN_PLOT.bottom - COLUMN_PLOT.top) / 3  # 0.0001 to 0.1
    assert [c.height for c in first.columns] == pytest.approx([3 * height, height, 0])
    assert [c.missing for c in first.columns] == [False, False, True]
    assert [c.height for c in second.columns][:2] == pytest.approx([2 * height, 0])
    assert not second.columns[1].missing
    assert first.y_ticks == second.y_ticks
    assert all(c.y + c.height == pytest.approx(COLUMN_PLOT.bottom) for p in (first, second) for c in p.columns)


@pytest.mark.parametrize(("layers", "every"), [(1, 1), (10, 1), (11, 2), (30, 5), (80, 10), (126, 20)])
def test_columns_of_many_layers(layers, every):
    (picture,) = lay_out_columns([Series("a", [0.1] * layers)])
    assert [t.text for t in picture.x_ticks] == [str(i) for i in range(0, layers, every)]
    assert all(b.x > a.x + a.width for a, b in zip(picture.columns, picture.columns[1:]))
    assert picture.columns[-1].x + picture.columns[-1].width < COLUMN_PLOT.right + 1e-9


def test_no_layers_are_no_columns():
    assert lay_out_columns([]) == []
    assert lay_out_columns([Series("a", [])])[0].columns == []
    assert all(c.height == 0 for c in lay_out_columns([Series("a", [NAN, NAN])])[0].columns)
