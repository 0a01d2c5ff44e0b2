"""The page of a trace: self-contained, complete, accessible, and true to the trace."""

import json
import random
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from lamina.app.report.labels import Box
from lamina.app.report.lines import PLOT, thin
from lamina.app.report.scales import LinearScale, linear_ticks
from lamina.app.report.strips import runs
from lamina.app.report.trace_page import render_trace
from lamina.app.trace_reader import Decision, MemoryUse, Run, Spread, read_trace
from lamina.app.values import format_bytes
from traces import EVENTS, closed, firing, memory, write

LEFT, RIGHT = 62, 428


def render(tmp_path, events=EVENTS, tail="", layers=None):
    return render_trace(read_trace(write(tmp_path / "t.jsonl", events, tail)), layers)


def parse(html):
    assert html.startswith("<!DOCTYPE html>\n")
    return ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>\n"))


@pytest.fixture
def html(tmp_path):
    return render(tmp_path, layers=[7])


@pytest.fixture
def page(html):
    return parse(html)


def words(element):
    return " ".join("".join(element.itertext()).split())


def table(page, name):
    (found,) = page.iterfind(f".//table[@id='{name}']")
    return [[words(cell) for cell in row] for row in found.iter("tr")]


def pictures(page):
    return {svg.get("aria-labelledby").split("-title")[0]: svg for svg in page.iter("svg")}


def strips(svg):
    """Row -> cells, as (first, how many, bits)."""
    found = {}
    for group in svg.iter("g"):
        cells = [
            (int(at), int(n), int(path.get("data-bits")))
            for path in group.iter("path")
            for at, n in re.findall(r"M(\d+) 0h(\d+)", path.get("d"))
        ]
        assert all(path.get("class") == f"tier-{path.get('data-bits')}" for path in group.iter("path"))
        found[group.get("data-row")] = sorted(cells)
    return found


def line(svg, name):
    (path,) = svg.iterfind(f"path[@data-name='{name}']")
    return path.get("d")


def heights(d):
    return [float(y) for y in re.findall(r"M[\d.]+ ([\d.]+)|V([\d.]+)", d) for y in y if y]


def test_nothing_is_fetched_or_run(html, page):
    assert not re.search(r"https?:|//|@import|url\(|@font-face", html.replace("</", "<"))
    assert not [e for e in page.iter() if e.tag in ("script", "link", "img", "iframe", "object", "embed", "base")]
    assert not [name for e in page.iter() for name in e.attrib if name in ("src", "href") or name.startswith("on")]


def test_readable_on_a_phone_and_by_machines(page):
    assert page.get("lang") == "en" and page.find(".//h1").text == "Trace of hand <&> made"
    for svg in page.iter("svg"):
        title, desc = svg.find("title"), svg.find("desc")
        assert svg.get("role") == "img" and svg.get("width") is None and title.text and desc.text
        assert svg.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
    ids = [e.get("id") for e in page.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    parents = {child: parent for parent in page.iter() for child in parent}
    assert all(parents[t].get("class") == "scroll" for t in page.iter("table"))


def test_all_colors_are_of_both_schemes(html):
    blocks = re.findall(r":root \{(.*?)\}", html, re.DOTALL)
    schemes = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in blocks]
    light, dark = {**schemes[0], **schemes[2]}, {**schemes[1], **schemes[3]}
    assert light.keys() == dark.keys() >= set(re.findall(r"var\(--([\w-]+)\)", html))
    for scheme in (light, dark):
        found = [luminance(scheme[name]) for name in ("page", "tier-2", "tier-4", "tier-8")]
        ratios = [(max(a, b) + 0.05) / (min(a, b) + 0.05) for a, b in pairwise(found)]
        assert ratios[0] >= 3 and min(ratios[1:]) >= 1.3, "told apart without hue"
        assert found == sorted(found) or found == sorted(found, reverse=True), "more bits stand out more"


def luminance(color):
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in bytes.fromhex(color[1:]))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_tiers_are_a_row_a_layer_and_a_column_a_decision(page):
    svgs = pictures(page)
    assert strips(svgs["tiers-k"]) == {
        "3": [(0, 1, 2), (1, 1, 4), (2, 1, 2)],
        "7": [(0, 2, 4), (2, 1, 8)],
        "11": [(0, 1, 2), (1, 2, 8)],
        "15": [(0, 3, 2)],
    }
    assert strips(svgs["tiers-v"]) == {
        "3": [(0, 3, 2)],
        "7": [(0, 1, 4), (1, 2, 2)],
        "11": [(0, 1, 8), (1, 1, 2), (2, 1, 4)],
        "15": [(0, 3, 2)],
    }
    texts = [t.text for t in svgs["tiers-k"].iter("text")]
    assert {"start", "16", "32", "3", "7", "11", "15"} <= set(texts)
    unit = float(re.search(r"scale\(([\d.]+) 1\)", svgs["tiers-k"].find("g").get("transform"))[1])
    assert unit == pytest.approx((RIGHT - LEFT) / 3, rel=1e-4)
    assert (
        svgs["tiers-k"].find("desc").text == "4 layers, 2 firings: 3 changes to more bits and 1 to fewer, in 3 layers"
    )
    assert table(page, "tiers-data")[1:] == [
        ["3", "2", "2", "1", "1", "2", "2", "0", "0"],
        ["7", "4", "8", "1", "0", "4", "2", "0", "1"],
        ["11", "2", "8", "1", "0", "8", "4", "1", "1"],
        ["15", "2", "2", "0", "0", "2", "2", "0", "0"],
    ]


def test_signals_and_tau_share_a_logarithmic_axis(tmp_path):
    ema = [[0.1, 0.01, 0.001]] * 8
    tiers = [[2, 4], [4, 4], [4, 4], [8, 4]]
    page = parse(render(tmp_path, [EVENTS[0], firing(4, tiers, 1.0, ema, 0.02), firing(8, tiers, 2.0, ema, 0.2)]))
    svg = pictures(page)["drift-k"]
    ticks = {t.text: float(t.get("y")) - 4 for t in svg.iter("text") if t.get("text-anchor") == "end"}
    assert set(ticks) == {"0.0001", "0.001", "0.01", "0.1", "1"}
    assert heights(line(svg, "median")) == pytest.approx([ticks["0.01"]] * 2, abs=0.1)
    assert sorted(set(heights(line(svg, "range")))) == pytest.approx([ticks["0.1"], ticks["0.001"]], abs=0.1)
    low, high = heights(line(svg, "tau"))
    assert ticks["0.01"] > low > ticks["0.1"] > high > ticks["1"]
    assert low - high == pytest.approx(ticks["0.01"] - ticks["0.1"], abs=0.2)
    assert svg.find("desc").text == "median over layers from 0.01 at first to 0.01 at last; tau from 0.02 to 0.2"
    starts = [float(x) for x in re.findall(r"M([\d.]+) ", line(svg, "median"))]
    assert starts == [pytest.approx(LEFT + (RIGHT - LEFT) / 3, abs=0.1)], "nothing was measured before the first firing"


def test_allocate_has_no_tau(tmp_path):
    start = {**EVENTS[0], "controller": {"policy": "allocate", "target_bits": 3.0}}
    html = render(tmp_path, [start, *EVENTS[1:]])
    assert 'data-name="tau"' not in html and "tau (dashed)" not in html and "Signals against" not in html
    assert "The policy allocate spends" in words(parse(html))
    assert 'data-name="tau"' in render(tmp_path)


def test_a_layer_that_gave_no_signal_leaves_a_gap(tmp_path):
    tiers = EVENTS[0]["tiers"]
    events = [EVENTS[0], *(firing(4 * i, tiers, i, [[]] * 8 if i == 2 else None) for i in (1, 2, 3))]
    assert line(pictures(parse(render(tmp_path, events)))["drift-v"], "median").count("M") == 2


def test_pages_show_what_they_hold_now(page):
    svgs = pictures(page)
    assert [name for name in svgs if name.startswith("pages")] == ["pages-7"]
    assert strips(svgs["pages-7"]) == {
        "K": [(0, 1, 8), (1, 1, 2), (2, 5, 8)],
        "V": [(0, 2, 4), (2, 1, 2), (3, 3, 4), (6, 1, 2)],
    }
    assert svgs["pages-7"].find("desc").text == ("pages of K: 1 of 2 bits, 6 of 8 bits; of V: 2 of 2 bits, 5 of 4 bits")


def test_windows_are_marked_where_attention_reads_exact_rows(page):
    unit = (RIGHT - LEFT) / 448
    rects = [(float(r.get("x")), float(r.get("width"))) for r in pictures(page)["pages-7"].iter("rect")]
    assert rects == [
        (pytest.approx(LEFT, abs=0.01), pytest.approx(64 * unit, abs=0.01)),
        (pytest.approx(LEFT + 320 * unit, abs=0.01), pytest.approx(128 * unit, abs=0.01)),
    ]
    assert "positions 0 to 63 and positions 320 to 447" in words(page)


def test_the_open_page_is_exact_too(tmp_path):
    html = render(tmp_path, [*EVENTS[:-1], memory(500, 1000)], layers=[7])
    assert "positions 0 to 63 and positions 320 to 499" in words(parse(html))


def test_layers_are_first_last_and_the_one_that_changed_most(tmp_path):
    events = [*EVENTS[:-1], *(closed(layer, [0], [2, 2], 8.5) for layer in (3, 11, 15))]
    page = parse(render(tmp_path, events))
    assert [n for n in pictures(page) if n.startswith("pages")] == ["pages-3", "pages-11", "pages-15"]
    page = parse(render(tmp_path))
    assert "Layer 11: no page was closed." in words(page) and "Layer 7" not in words(page)


def test_bits_and_bytes_follow_time(page):
    svg = pictures(page)["bits"]
    ticks = {t.text: float(t.get("y")) - 4 for t in svg.iter("text") if t.get("text-anchor") == "end"}
    assert set(ticks) == {"2", "4", "8", "16"}
    assert heights(line(svg, "context"))[0] == pytest.approx(ticks["8"] + (ticks["16"] - ticks["8"]) * 0.58496, abs=0.1)
    assert len(heights(line(svg, "decided"))) == 3 and len(heights(line(svg, "history"))) == 1
    first, second, last = (float(x) for x in re.findall(r"H([\d.]+)", line(svg, "decided")))
    time = (RIGHT - LEFT) / 9
    assert (first, second, last) == pytest.approx((LEFT + 2 * time, LEFT + 4 * time, RIGHT), abs=0.1)
    svg = pictures(page)["bytes"]
    found = {name: heights(line(svg, name)) for name in ("cache", "bf16", "limit")}
    per_byte = (PLOT.bottom - PLOT.top) / (5_000_000 * 1.04)
    assert found["cache"] == pytest.approx([PLOT.bottom - n * per_byte for n in (600000, 900000)], abs=0.1)
    assert found["bf16"] == pytest.approx([PLOT.bottom - n * per_byte for n in (800000, 1380000)], abs=0.1)
    assert found["limit"] == pytest.approx([PLOT.bottom - 5_000_000 * per_byte], abs=0.1)
    assert svg.find("desc").text == "586 KiB at first, 879 KiB at last, 879 KiB at most"
    assert table(page, "kinds") == [
        ["codes", "799,000"], ["windows", "1,000"], ["host layers", "100,000"], ["in all", "900,000"]
    ]  # fmt: skip


def test_the_facts(page):
    assert dict(table(page, "facts")) == {
        "model": "hand <&> made",
        "Lamina": "0.1.0",
        "packed layers": "4: 3, 7, 11, 15",
        "windows": "sink 64, recent 128, rollback 64 tokens",
        "controller": "policy threshold, rate 0.25, tiers 2/4/8, tau0 0.02",
        "bytes allowed": "5,000,000 (4.77 MiB)",
        "time": "9.0 s",
        "tokens": "448",
        "firings": "2",
        "tier changes of K": "3 up, 1 down",
        "tier changes of V": "1 up, 2 down",
        "pages closed": "13",
        "planes shed": "3: 2 of K, 1 of V",
        "bits decided": "3.08 on average at the end",
        "bits of packed tokens": "3.5",
        "bits of everything": "10",
        "final bytes": "900,000 (879 KiB), 65% of bf16",
    }


def test_what_did_not_happen_is_said(tmp_path):
    fixed = {**EVENTS[0], "controller": None, "max_bytes": None, "tiers": [[4, 2]] * 4}
    page = parse(render(tmp_path, [fixed, EVENTS[-1]]))
    assert not list(page.iter("svg"))
    text = words(page)
    assert text.count("There was no controller: the run began with fixed tiers, k4v2 bits in every layer.") == 2
    assert "No page was closed" in text and "The trace tells no bytes" in text
    assert "cut short" not in text
    page = parse(render(tmp_path, EVENTS[:4]))
    assert words(page).count("The controller never fired: the tiers stayed as the run began, 2, 4, k2v8 bits") == 2
    assert set(pictures(page)) == {"pages-3", "pages-7", "bits", "bytes"}


def test_a_run_that_was_cut_short_is_said(tmp_path):
    assert "the trace has no end event" in render(tmp_path, EVENTS[:-1])
    assert "line 9, the last one, is not whole" in render(tmp_path, EVENTS[:8], '{"event": "clo')


def test_a_large_trace_is_a_page_of_sane_size(tmp_path):
    run, chance = read_trace(write(tmp_path / "t.jsonl", EVENTS[:1])), random.Random(0)
    layers = list(range(80))
    start = run.start.__class__(**{**vars(run.start), "layers": layers, "kv_heads": [8] * 80, "head_dims": [128] * 80,
                                   "tiers": [(2, 2)] * 80})  # fmt: skip
    rows = [[(chance.choice((2, 4, 8)), chance.choice((2, 4, 8))) for _ in layers] for _ in range(97)]
    spread = Spread(1e-5, 1e-3, 1.0)
    firings = [Decision(i, i, i, 0.02, rows[i % 97], (spread, spread)) for i in range(10_000)]
    use = [MemoryUse(i, i, i, {"codes": i}, 3.0 + i % 2, 4.0, i) for i in range(1, 10_000)]
    pages = {n: {64 * i: [chance.choice((2, 4, 8)) for _ in "kv"] for i in range(2048)} for n in layers}
    large = Run(start, firings, use, pages, context=131072, seconds=1e4, ended=True)
    html = render_trace(large)
    assert len(html) < 500_000
    page = parse(html)
    assert len(strips(pictures(page)["tiers-k"])) == 80
    assert "10,000 firings, and each column shows the most frequent tier" in words(page)
    assert len(render_trace(large, layers)) < 3_000_000


def test_every_place_is_inside_its_picture(traced):
    page = parse(render_trace(read_trace(traced.file)))
    assert page.find(".//h1").text == "Trace of tiny <&> model"
    assert set(pictures(page)) == {"tiers-k", "tiers-v", "drift-k", "drift-v", "pages-0", "pages-1", "bits", "bytes"}
    assert strips(pictures(page)["tiers-v"]) == {"0": [(0, 1, 8), (1, 3, 4)], "1": [(0, 1, 8), (1, 3, 4)]}
    assert strips(pictures(page)["pages-0"])["K"] == [(0, 8, 2)], "closed at 8 bits, then shed, then closed at 2"
    assert strips(pictures(page)["pages-0"])["V"] == [(0, 7, 8), (7, 1, 4)]
    for svg in page.iter("svg"):
        box = Box(0, 0, *map(float, svg.get("viewBox").split()[2:]))
        for path in svg.iterfind("path[@data-name]"):
            xs = [float(x) for pair in re.findall(r"M([\d.]+) |H([\d.]+)", path.get("d")) for x in pair if x]
            assert all(LEFT - 0.1 <= x <= RIGHT + 0.1 for x in xs)
            assert all(box.top <= y <= box.bottom for y in heights(path.get("d")))
    facts = dict(table(page, "facts"))
    assert facts["planes shed"] == "28: 28 of K, 0 of V" and facts["firings"] == "3"


def test_the_command_writes_beside_the_trace_or_where_it_is_told(lamina, refused, tmp_path):
    file = write(tmp_path / "run.jsonl")
    result = lamina("trace", file)
    assert result.exit_code == 0 and str(tmp_path / "run.html") in result.stdout
    assert (tmp_path / "run.html").read_text(encoding="utf-8") == render(tmp_path)
    assert lamina("trace", file, "-o", tmp_path / "x.html", "--layers", "7, 3").exit_code == 0
    page = parse((tmp_path / "x.html").read_text(encoding="utf-8"))
    assert [n for n in pictures(page) if n.startswith("pages")] == ["pages-7", "pages-3"]
    refused("trace", file, "--layers", "7,8", words="--layers 8 packed 15")
    refused("trace", file, "--layers", "", words="--layers")
    refused("trace", file, "-o", tmp_path / "none" / "x.html", words="cannot write -o")
    refused("trace", file, "-o", file, words="replace -o")
    refused("trace", tmp_path / "no.jsonl", words="cannot read no.jsonl")
    refused("trace", write(tmp_path / "empty.jsonl", []), words="empty")
    assert not (tmp_path / "empty.html").exists()


def test_json_is_the_summary_alone(lamina, tmp_path):
    result = lamina("trace", write(tmp_path / "run.jsonl"), "--json")
    assert json.loads(result.stdout) == {
        "model": "hand <&> made",
        "complete": True,
        "tokens": 448,
        "firings": 2,
        "pages_closed": 13,
        "planes_shed": {"k": 2, "v": 1, "total": 3},
        "exact_shed": 0,
        "changes": {"k": {"up": 3, "down": 1}, "v": {"up": 1, "down": 2}},
        "final_tiers": {"3": [2, 2], "7": [8, 2], "11": [8, 4], "15": [2, 2]},
        "decided_bits": pytest.approx(3.0769, abs=1e-4),
        "bits_history": 3.5,
        "bits_at_context": 10.0,
        "final_bytes": 900000,
        "bf16_bytes": 1380000,
    }
    assert not (tmp_path / "run.html").exists()


def test_runs_join_equal_neighbours_only():
    assert list(runs([(0, 2), (1, 2), (3, 2), (4, 0), (5, 4)])) == [(0, 2, 2), (3, 1, 2), (5, 1, 4)]
    assert list(runs([])) == []


def test_thinning_keeps_ends_and_extremes():
    values = [float(i % 7) for i in range(1000)]
    values[333], values[777] = 100.0, -100.0
    kept = thin(values, 40)
    assert len(kept) <= 40 and {0, 333, 777, 999} <= set(kept) and kept == sorted(kept)
    assert thin(values, 1000) == list(range(1000))


def test_ticks_are_round():
    assert [t.text for t in linear_ticks(LinearScale(9, 0, 90), lambda v: f"{v:g}")] == ["0", "2", "4", "6", "8"]
    assert [t.at for t in linear_ticks(LinearScale(9, 0, 90), str)] == pytest.approx([0, 20, 40, 60, 80])
    ticks = linear_ticks(LinearScale(5 * 2**20, 0, 1), format_bytes, binary=True)
    assert [t.text for t in ticks] == ["0 B", "1.00 MiB", "2.00 MiB", "3.00 MiB", "4.00 MiB", "5.00 MiB"]
