"""The page of an evaluation: true to its figures, complete, self-contained."""

import json
import re

import pytest

from evaluations import ENVIRONMENT, answer, parse, pictures, table, words, write
from lamina.app.evaluation_reader import read_folder
from lamina.app.evaluation_report import run_report
from lamina.app.report.accuracy import PLOT, lay_out_accuracy, share_axis
from lamina.app.report.environment import format_figure
from lamina.app.report.evaluation_markdown import as_markdown
from lamina.app.report.evaluation_page import render_evaluation
from lamina.app.report.evaluation_tables import score_table
from lamina.eval.arms import ARMS
from lamina.eval.statistics import Interval, detectable_difference, exact_mcnemar
from lamina.eval.summary import Score


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path)


@pytest.fixture
def html(folder):
    return render_evaluation(read_folder(folder))


@pytest.fixture
def page(html):
    return parse(html)


def test_the_table_holds_the_statistics(page):
    header, exact, worse, live, part = table(page, "w1-scores")
    assert header == [
        "arm", "bits", "in all", "n", "right", "95 %", "verdict", "detectable, points", "less bf16, points", "95 %",
        "gained, lost", "p", "Holm p",
    ]  # fmt: skip
    assert exact == ["bf16", "16.00", "17.00", "20", "75.0%", "53.1 to 88.8%", *["–"] * 7]
    p = exact_mcnemar(0, 10), exact_mcnemar(2, 1)
    assert worse[:5] == ["kivi-int2 (simulated)", "2.50", "3.50", "20", "25.0%"] and worse[5] == "11.2 to 46.9%"
    assert worse[6] == "worse" and worse[7] == f"{100 * detectable_difference(20, 0.5):.1f}"
    assert worse[8] == "-50.0" and re.fullmatch(r"-7\d\.0 to -[23]\d\.0", worse[9])
    assert worse[10:] == ["0, 10", format_figure(p[0]), format_figure(2 * p[0])]
    assert live[6:9] == ["undecided", "none", "+5.0"] and live[10:] == ["2, 1", "1", "1"] and p[1] == 1
    assert part[3:7] == ["7", "100.0%", "64.6 to 100.0%", "not yet: other prompts than bf16"]
    assert part[1] == "–"
    seeds = table(page, "w1-seeds")
    assert seeds[0] == ["arm", "seed 1 of 2", "seed 2 of 2", "bits, 95 %", "in all, 95 %"]
    assert seeds[1][1:3] == ["100.0%", "50.0%"] and seeds[4] == ["lamina-int2", "100.0%", "–", "–", "–"]
    assert re.fullmatch(r"2\.[23]\d to 2\.[67]\d", seeds[2][3]) and seeds[3][3] == "3.00 to 3.00"
    assert "has not finished" in " ".join(words(p) for p in page.iterfind(".//p[@class='note']"))


def score(arm, mean, low, high, bits, bits_low=None, bits_high=None, simulated=False):
    band = None if bits is None else Interval(bits, bits_low or bits, bits_high or bits)
    return Score("t", arm, 9, Interval(mean, low, high), [mean], bits, bits, None, None, simulated, band, band)


def test_points_and_bars_are_where_their_figures_are():
    scores = [
        score("bf16", 0.8, 0.6, 1.0, 16.0),
        score("a", 0.6, 0.5, 0.7, 4.0, 2.0, 8.0),
        score("b", 0.4, 0.2, 0.9, 2.0),
        score("c", 0.4, 0.0, 1.0, None),
    ]
    found = lay_out_accuracy(scores)
    exact, a, b = found.points
    assert found.missing == ["c"] and [t.text for t in found.y_ticks] == ["20%", "40%", "60%", "80%", "100%"]
    height = PLOT.bottom - PLOT.top
    assert [p.y for p in found.points] == pytest.approx([PLOT.bottom - height * s for s in (0.75, 0.5, 0.25)])
    assert (a.top, a.bottom) == pytest.approx((PLOT.bottom - height * 0.625, PLOT.bottom - height * 0.375))
    assert (b.top, b.bottom) == pytest.approx((PLOT.bottom - height * 0.875, PLOT.bottom))
    assert a.left == pytest.approx(b.x) and exact.x - a.right == pytest.approx(a.right - a.x) == a.x - a.left
    assert [t.at for t in found.x_ticks] == pytest.approx([b.x, a.x, a.right, exact.x])
    assert f"M{a.left:.2f} {a.y:.2f}H{a.right:.2f}M{a.x:.2f} {a.bottom:.2f}V{a.top:.2f}" in a.bars


@pytest.mark.parametrize(
    ("shares", "axis"),
    [
        ([], (0.0, 1.0, 0.2)),
        ([0.0, 1.0], (0.0, 1.0, 0.2)),
        ([0.91, 0.93], (0.91, 0.93, 0.005)),
        ([0.42, 0.79], (0.4, 0.8, 0.1)),
        ([0.5, 0.5], (0.5, 0.505, 0.005)),
    ],
)
def test_the_axis_of_shares_fits_them(shares, axis):
    assert share_axis(shares) == pytest.approx(axis)


def test_every_arm_has_a_mark_and_simulated_ones_say_so(page):
    svg = pictures(page)["w1-accuracy"]
    circles = {c.get("data-arm"): c for c in svg.iter("circle")}
    assert list(circles) == ["bf16", "kivi-int2", "lamina-live"]
    assert [("simulated" in c.get("class")) for c in circles.values()] == [False, True, False]
    assert {t.text for t in svg.iter("text")} >= {"bf16", "kivi-int2 (simulated)", "lamina-live"}
    assert {p.get("data-arm") for p in svg.iter("path") if "bar" in p.get("class")} == set(circles)
    assert "nothing was packed: lamina-int2." in words(page)
    assert page.find(".//p[@id='simulated']") is not None


def test_many_arms_get_numbers_that_are_apart():
    bits = {name: 2.5 + 0.05 * i for i, name in enumerate(ARMS)}
    scores = [
        score(n, 0.7 + 0.01 * (i % 4), 0.6, 0.8, bits[n], simulated=a.simulated)
        for i, (n, a) in enumerate(ARMS.items())
    ]
    found = lay_out_accuracy(scores)
    assert found.key[0] == "bf16" and "echokv (simulated)" in found.key and len(found.key) == len(ARMS)
    assert [p.label.text for p in found.points] == [str(i + 1) for i in range(len(ARMS))]
    boxes = [p.label.box for p in found.points]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(box.is_within(PLOT) for box in boxes)


def test_tiers_of_every_seed_and_what_was_frozen(page):
    svg = pictures(page)["w1-tiers-1"]
    rows = {
        g.get("data-row"): {p.get("data-bits"): p.get("d") for p in g.iter("path")} for g in svg.iter("g")
    }  # fmt: skip
    assert rows == {
        "seed 0 K": {"2": "M0 0h2", "8": "M2 0h1"},
        "seed 0 V": {"2": "M1 0h2", "4": "M0 0h1"},
        "seed 1 K": {"2": "M0 0h1", "4": "M1 0h1", "8": "M2 0h1"},
        "seed 1 V": {"2": "M0 0h2", "4": "M2 0h1"},
        "frozen K": {"2": "M0 0h1", "4": "M1 0h1", "8": "M2 0h1"},
        "frozen V": {"2": "M0 0h2", "4": "M2 0h1"},
    }
    assert [t.text for t in svg.iter("text") if t.get("text-anchor") == "middle"][:3] == ["1", "3", "5"]
    assert "seed 0: 3.33 bits on average" in svg.find("desc").text
    assert "w1-tiers-2" not in pictures(page)


def test_tiers_of_live_runs_are_those_of_each_seeds_end(tmp_path):
    given = [
        answer("echokv", i, True, 5.0, tiers=[[16 if i < 10 else 8, 4 if i == 9 else 2]], controller={})
        for i in range(20)
    ]
    svg = pictures(parse(render_evaluation(read_folder(write(tmp_path, given)))))["w1-tiers-1"]
    rows = {g.get("data-row"): [p.get("data-bits") for p in g.iter("path")] for g in svg.iter("g")}
    assert rows == {"seed 0 K": ["16"], "seed 0 V": ["4"], "seed 1 K": ["8"], "seed 1 V": ["2"]}
    assert "echokv (simulated)" in svg.find("title").text, "from its name, where records do not tell"


def test_bytes_are_to_scale(page):
    svg = pictures(page)["w1-bytes"]
    widths = {(r.get("data-arm"), r.get("data-kind")): float(r.get("width")) for r in svg.iter("rect")}
    unit = widths["bf16", "windows"] / 4000
    expected = {
        ("bf16", "windows"): 4000, ("kivi-int2 (simulated)", "codes"): 500, ("kivi-int2 (simulated)", "windows"): 400,
        ("lamina-live", "codes"): 609.5, ("lamina-live", "scales"): 100, ("lamina-live", "windows"): 300,
    }  # fmt: skip
    assert {key: width / unit for key, width in widths.items()} == pytest.approx(expected, abs=0.6)
    assert table(page, "w1-bytes-data")[3] == ["lamina-live", "300", "610", "100", "1,010", "25.2%"]
    assert "lamina-live: 1,010 B, 25% of bf16" in svg.find("desc").text
    assert "lamina-int2" not in {arm for arm, _ in widths}, "its bytes were not recorded"


def test_records_of_before(tmp_path):
    """Without bytes by kind, environment or marks of simulated arms; what is missing is said, not made up."""
    given = [
        answer(arm, i, True, bits, kv_bytes=100 * bits)
        for arm, bits in (("bf16", 16), ("kivi-int2", 4))
        for i in range(4)
    ]
    folder = write(tmp_path, given)
    page = parse(render_evaluation(read_folder(folder)))
    assert {r.get("data-kind") for r in pictures(page)["w1-bytes"].iter("rect")} == {"kinds not recorded"}
    assert table(page, "w1-bytes-data") == [
        ["arm", "in all", "of bf16"], ["bf16", "1,600", "100.0%"], ["kivi-int2 (simulated)", "400", "25.0%"]
    ]  # fmt: skip
    assert "Kinds were not recorded for bf16, kivi-int2 (simulated)." in words(page)
    assert page.find(".//p[@id='no-command']") is not None and page.find(".//p[@id='no-environment']") is not None
    assert not page.findall(".//table[@id='environment']") and "Tiers by layer" not in words(page)
    assert "Fidelity" not in words(page)
    write(tmp_path / "x" if (tmp_path / "x").mkdir() is None else tmp_path, [answer("lamina-int2", 0, True, 2.5)])
    alone = parse(render_evaluation(read_folder(tmp_path / "x")))
    assert alone.find(".//p[@id='w1-no-bytes']") is not None
    assert table(alone, "w1-scores")[1][6] == "bf16 was not run"


def test_nothing_is_fetched_and_both_schemes_are_there(html, page):
    assert not re.search(r"https?:|//|@import|url\(|@font-face", html.replace("</", "<"))
    assert not [e for e in page.iter() if e.tag in ("script", "link", "img", "iframe", "object", "embed", "base")]
    assert "color-scheme: light dark" in html and html.count("@media (prefers-color-scheme: dark)") == 2
    for block in re.findall(r":root \{(.*?)\}", html, re.DOTALL)[2:]:
        assert re.findall(r"--tier-(\d+):", block) == ["2", "4", "8", "16"]
    ids = [e.get("id") for e in page.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    assert page.find(".//h1").text == "Evaluation of tiny <&> model"
    for svg in page.iter("svg"):
        assert svg.find("title").text and svg.find("desc").text


def test_fidelity_beside_the_answers(folder):
    arms = [
        {"name": "bf16", "kl_mean": 5e-5, "kl_median": None, "top1": 0.997, "bits_history": 16.0},
        {"name": "kivi-int2", "simulated": True, "kl_mean": 0.07, "kl_by_position": [[0, 0.01], [64, 0.1], [128, 1.0]],
         "kl_by_layer": [0.1, None, 0.01]},
    ]  # fmt: skip
    (folder / "gsm.json").write_text(json.dumps({"model": "m", "text": "gsm8k", "tokens": 4096, "arms": arms}))
    page = parse(render_evaluation(read_folder(folder)))
    rows = table(page, "f1-fidelity")
    assert rows[1] == ["bf16", "16.00", "–", "5.00e-05", "–", "–", "99.7%", "–"]
    assert rows[2][:4] == ["kivi-int2 (simulated)", "–", "–", "0.07"]
    (curve,) = (p for p in pictures(page)["f1-positions"].iter("path") if "curve" in p.get("class"))
    at = [tuple(map(float, point.split())) for point in re.split("[ML]", curve.get("d"))[1:]]
    assert at[1][0] - at[0][0] == pytest.approx(at[2][0] - at[1][0], abs=0.2)
    assert at[0][1] - at[1][1] == pytest.approx(at[1][1] - at[2][1], abs=0.2) and at[0][1] > at[1][1]
    assert [r.get("data-layer") for r in pictures(page)["f1-layers-1"].iter("rect")] == ["0", "2"]
    assert "## Fidelity: gsm.json" in run_report(folder, None).markdown


def test_markdown_escapes_what_would_end_a_cell():
    scores = [score("a|b", 0.5, 0.4, 0.6, 2.0)]
    assert score_table(scores).markdown().splitlines()[2].startswith("| a\\|b | 2.00 |")


def test_orders_of_the_same_prompts(tmp_path):
    """Ten prompts in two orders; the second gets two more right, and ends with other bits in one layer."""
    tiers = ([[2, 4], [2, 2]], [[2, 4], [8, 2]])
    given = [answer("lamina-live", i, i < 5, 3.0, tiers=tiers[0], controller={"step": i}) for i in range(10)]
    given += [
        answer("lamina-live", i, i < 7, 4.0, tiers=tiers[1], controller={"step": i}) | {"kind": "reordered", "order": 1}
        for i in range(10)
    ]
    found = read_folder(write(tmp_path, [ENVIRONMENT, *given]))
    page = parse(render_evaluation(found))
    assert table(page, "w1-orders") == [
        ["arm", "figure", "orders", "mean", "95 % over orders", "least", "most"],
        ["lamina-live", "right", "2", "60.0%", "50.0 to 70.0%", "50.0%", "70.0%"],
        ["lamina-live", "bits", "2", "3.50", "3.00 to 4.00", "3.00", "4.00"],
        ["lamina-live", "bits decided at the end", "2", "3.25", "2.50 to 4.00", "2.50", "4.00"],
    ]
    svg = pictures(page)["w1-orders-1"]
    rows = {g.get("data-row"): {p.get("data-bits"): p.get("d") for p in g.iter("path")} for g in svg.iter("g")}
    assert rows == {
        "K 1": {"2": "M0 0h2"}, "K 2": {"2": "M0 0h1", "8": "M1 0h1"},
        "V 1": {"4": "M0 0h1", "2": "M1 0h1"}, "V 2": {"4": "M0 0h1", "2": "M1 0h1"},
    }  # fmt: skip
    assert "2 of 10 prompts are right in some orders and wrong in others; 88% of tiers" in svg.find("desc").text
    assert table(page, "w1-scores")[1][3] == "10", "further orders are no further answers"
    assert "| lamina-live | right | 2 | 60.0% |" in as_markdown(found)
