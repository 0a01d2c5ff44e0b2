"""The report's HTML: self-contained, complete, accessible, and true to its figures."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from lamina.app.demo import DemoRow
from lamina.app.report.columns import Series
from lamina.app.report.page import Report, format_figure, render, write_report
from lamina.errors import ConfigError

NAN = float("nan")
KINDS = ("codes", "scales", "centers", "windows", "page_tables")


def packed(name, kl, bits=2.5, n_bytes=(400, 150, 50, 300, 100)):
    return DemoRow(name, bits, sum(n_bytes), 4000, kl, 0.9, 12.3, dict(zip(KINDS, n_bytes)))


def exact(kl=5e-5, n_bytes=4000):
    return DemoRow("bf16", 16.0, n_bytes, 4000, kl, 0.997, 45.6, {"rows": n_bytes})


ROWS = [exact(), packed("naive-int2", 1.2), packed("lamina-int2", 0.0069), packed("lamina-int4", 3e-4, 4.5)]
DRIFT = [Series("lamina-int2", [0.1, 0.01, 0.001]), Series("lamina-int4", [0.003, NAN, 0.0])]


def report(rows=ROWS, drift=DRIFT, **changes):
    fields = {
        "model": "tiny <&> model",
        "title": "what it is of",
        "rows": rows,
        "drift": drift,
        "drift_tokens": 2048,
        "drift_queries": 64,
        "environment": [("versions", 'lamina "0" <1>')],
        "notes": ["A & B"],
        "command": "lamina demo --model 'a b'",
    }
    return Report(**{**fields, **changes})


def parse(html):
    assert html.startswith("<!DOCTYPE html>\n")
    return ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>\n"))


@pytest.fixture(scope="module")
def html():
    return render(report())


@pytest.fixture(scope="module")
def page(html):
    return parse(html)


def table(page, name):
    (found,) = page.iterfind(f".//table[@id='{name}']")
    return [["".join(cell.itertext()) for cell in row] for row in found.iter("tr")]


def pictures(page):
    return {svg.get("aria-labelledby").split("-title")[0]: svg for svg in page.iter("svg")}


def test_nothing_is_fetched_or_run(html, page):
    assert not re.search(r"https?:|//|@import|url\(|@font-face", html.replace("</", "<"))
    assert not [e for e in page.iter() if e.tag in ("script", "link", "img", "iframe", "object", "embed", "base")]
    assert not [name for e in page.iter() for name in e.attrib if name in ("src", "href") or name.startswith("on")]


def test_text_is_escaped(page):
    assert page.find(".//h1").text == "Lamina on tiny <&> model"
    assert table(page, "environment") == [["versions", 'lamina "0" <1>']]
    assert "".join(page.find(".//pre[@id='command']").itertext()) == "lamina demo --model 'a b'"
    assert "A & B" in [p.text for p in page.iter("p")]


def test_readable_on_a_phone_and_by_machines(page):
    assert page.get("lang") == "en"
    metas = {m.get("name"): m.get("content") for m in page.iter("meta")}
    assert metas["viewport"] == "width=device-width, initial-scale=1"
    for svg in page.iter("svg"):
        assert svg.get("role") == "img"
        assert svg.get("width") is None, "a fixed width would not fit a phone"
        title, desc = (svg.find(kind) for kind in ("title", "desc"))
        assert svg.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
        assert title.text and desc.text
    ids = [e.get("id") for e in page.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    parents = {child: parent for parent in page.iter() for child in parent}
    assert all(parents[t].get("class") == "scroll" for t in page.iter("table"))
    assert all(h.get("scope") in ("row", "col") for h in page.iter("th"))


def test_every_arm_is_in_every_picture_and_table(page):
    names = [row.name for row in ROWS]
    svgs = pictures(page)
    assert [c.get("data-arm") for c in svgs["fidelity"].iter("circle")] == names
    assert {t.text for t in svgs["fidelity"].iter("text")} >= set(names)
    assert list(dict.fromkeys(r.get("data-arm") for r in svgs["bytes"].iter("rect"))) == names
    for name in ("comparison", "fidelity-data", "bytes-data"):
        assert [row[0] for row in table(page, name)[1:]] == names


def test_bars_are_as_long_as_their_bytes(page):
    widths = {
        (r.get("data-arm"), r.get("data-kind")): float(r.get("width")) for r in pictures(page)["bytes"].iter("rect")
    }
    unit = widths["bf16", "rows"] / 4000
    expected = {(row.name, kind): n for row in ROWS for kind, n in row.bytes_by_kind.items()}
    assert {key: width / unit for key, width in widths.items()} == pytest.approx(expected, rel=1e-2)
    for name in ("naive-int2", "lamina-int4"):
        bar = [r for r in pictures(page)["bytes"].iter("rect") if r.get("data-arm") == name]
        ends = [(float(r.get("x")), float(r.get("x")) + float(r.get("width"))) for r in bar]
        assert all(a[1] == pytest.approx(b[0], abs=2e-3) for a, b in pairwise(ends))
    references = [p.get("d") for p in pictures(page)["bytes"].iter("path")]
    bf16 = next(r for r in pictures(page)["bytes"].iter("rect") if r.get("data-arm") == "bf16")
    end = float(bf16.get("x")) + float(bf16.get("width"))
    assert len(references) == len(ROWS)
    assert all(float(re.match(r"M([\d.]+) ", d)[1]) == pytest.approx(end, abs=2e-3) for d in references)


def test_points_follow_bits_and_divergence(page):
    points = {
        c.get("data-arm"): (float(c.get("cx")), float(c.get("cy"))) for c in pictures(page)["fidelity"].iter("circle")
    }
    assert points["naive-int2"][0] == points["lamina-int2"][0] < points["lamina-int4"][0] < points["bf16"][0]
    assert points["naive-int2"][1] < points["lamina-int2"][1] < points["lamina-int4"][1] < points["bf16"][1]


def test_columns_follow_layers(page):
    svgs = pictures(page)
    heights = {int(r.get("data-layer")): float(r.get("height")) for r in svgs["drift-1"].iter("rect")}
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=2e-3)
    assert heights[2] > 0
    second = {int(r.get("data-layer")): float(r.get("height")) for r in svgs["drift-2"].iter("rect")}
    assert second[2] == 0
    assert 1 not in second
    assert "–" in [t.text for t in svgs["drift-2"].iter("text")]
    assert "from 0.001 in layer 2 to 0.1 in layer 0" in svgs["drift-1"].find("desc").text


def test_tables_hold_the_figures(page):
    assert table(page, "comparison")[0] == ["arm", "bits", "KV cache", "of bf16", "KL mean", "top-1", "tok/s"]
    assert table(page, "comparison")[3] == ["lamina-int2", "2.50", "1,000 B", "25%", "0.0069", "90.0%", "12.3"]
    assert table(page, "fidelity-data")[1:3] == [["bf16", "16", "5.00e-05"], ["naive-int2", "2.5", "1.2"]]
    kinds = ["rows", "codes", "scales", "centers", "windows", "page tables"]
    assert table(page, "bytes-data")[0] == ["arm", *kinds, "in all"]
    assert table(page, "bytes-data")[1:3] == [
        ["bf16", "4,000", "0", "0", "0", "0", "0", "4,000"],
        ["naive-int2", "0", "400", "150", "50", "300", "100", "1,000"],
    ]
    assert table(page, "drift-data") == [
        ["layer", "lamina-int2", "lamina-int4"],
        ["0", "0.1", "0.003"],
        ["1", "0.01", "–"],
        ["2", "0.001", "0"],
    ]


@pytest.mark.parametrize(
    ("rows", "drift"),
    [
        ([exact()], []),
        ([packed("lamina-int2", 0.0)], [Series("lamina-int2", [0.0])]),
        ([packed("lamina-int2", NAN, NAN), exact(0.0)], [Series("lamina-int2", [NAN, NAN])]),
        ([packed("lamina-int2", 0.1, n_bytes=(9000, 0, 0, 0, 1)), exact()], [Series("a", [0.1] * 80)]),
    ],
)
def test_odd_figures(rows, drift):
    page = parse(render(report(rows, drift)))
    assert "nan" not in re.sub(r"lamina|naive", "", render(report(rows, drift))).lower()
    assert [row[0] for row in table(page, "fidelity-data")[1:]] == [row.name for row in rows]
    for svg in page.iter("svg"):
        _, _, width, height = map(float, svg.get("viewBox").split())
        for rect in svg.iter("rect"):
            x, y, w, h = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
            assert 0 <= x <= x + w <= width and 0 <= y <= y + h <= height


def test_what_cannot_be_drawn_is_named():
    caption = " ".join(render(report([packed("lamina-int2", NAN), exact(0.0)])).split())
    assert "Not drawn for want of figures: lamina-int2." in caption
    assert "A KL of zero is drawn at the lower edge." in caption
    assert "Not drawn" not in render(report())


@pytest.mark.parametrize(
    ("value", "text"),
    [(NAN, "–"), (0.0, "0"), (0.00689, "0.00689"), (1.234567, "1.23"), (0.00005, "5.00e-05"), (1e-4, "0.0001")],
)
def test_figures_have_three_digits(value, text):
    assert format_figure(value) == text


def schemes(html):
    blocks = re.findall(r":root \{(.*?)\}", html, re.DOTALL)
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in blocks]


def luminance(color):
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in bytes.fromhex(color[1:]))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_both_color_schemes_have_contrast(html):
    assert "color-scheme: light dark" in html
    assert html.count("@media (prefers-color-scheme: dark)") == 1
    light, dark = schemes(html)
    assert light.keys() == dark.keys()
    assert luminance(light["page"]) > 0.9 > 0.05 > luminance(dark["page"])
    for scheme in (light, dark):
        for name, color in scheme.items():
            if name in ("text", "soft", "link"):
                assert contrast(color, scheme["page"]) >= 7 - 0.6 * (name == "link"), name
            elif name.startswith(("kind", "lamina", "other")):
                assert contrast(color, scheme["page"]) >= 4, name
        assert contrast(scheme["text"], scheme["panel"]) >= 7
    used = set(re.findall(r"var\(--([\w-]+)\)", html))
    assert used == light.keys()


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match="--report"):
        write_report(report(), tmp_path / "none" / "x.html")
    write_report(report(), tmp_path / "x.html")
    assert (tmp_path / "x.html").read_text(encoding="utf-8") == render(report())
