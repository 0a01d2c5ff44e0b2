"""Traces are read back as they were meant, and what is damaged is named by its line."""

import json

import pytest

import traces
from lamina.app.trace_reader import Spread, average_bits, read_trace
from lamina.app.trace_summary import Changes, as_json, summarise
from lamina.control.trace import Trace
from lamina.errors import DataError
from lamina.pages.table import FINE, FINEST, START, TIER
from traces import EVENTS, closed, firing, memory, shed, write


def read(tmp_path, events=EVENTS, tail=""):
    return read_trace(write(tmp_path / "t.jsonl", events, tail))


def test_changes_count_from_the_tiers_before_the_first_firing(tmp_path):
    summary = summarise(read(tmp_path))
    assert summary.changes == {"k": Changes(3, 1), "v": Changes(1, 2)}
    assert summary.layer_changes == [
        (Changes(1, 1), Changes(0, 0)),
        (Changes(1, 0), Changes(0, 1)),
        (Changes(1, 0), Changes(1, 1)),
        (Changes(0, 0), Changes(0, 0)),
    ]
    assert summary.final_tiers == [(2, 2), (8, 2), (8, 4), (2, 2)]


def test_averages_are_weighted_by_the_elements_of_each_layer(tmp_path):
    run = read(tmp_path)
    assert run.start.sizes == [512, 128, 128, 64]
    assert average_bits(run.start.tiers, run.start.sizes) == (4 * 512 + 8 * 128 + 10 * 128 + 4 * 64) / (2 * 832)
    assert summarise(run).decided_bits == (4 * 512 + 10 * 128 + 12 * 128 + 4 * 64) / (2 * 832)


def test_pages_hold_what_they_were_closed_at_less_what_was_shed(tmp_path):
    run = read(tmp_path)
    assert run.pages[3] == {start: [4, 2] for start in range(0, 384, 64)}
    assert run.pages[7] == {
        0: [8, 4], 64: [2, 4], 128: [8, 2], 192: [8, 4], 256: [8, 4], 320: [8, 4], 384: [8, 2]
    }  # fmt: skip
    assert run.pages[11] == run.pages[15] == {}
    assert (run.closed, dict(run.shed)) == (13, {"k": 2, "v": 1})
    assert not run.rewritten


def test_a_page_that_closes_again_is_whole_again(tmp_path):
    run = read(tmp_path, [*EVENTS[:8], closed(7, [64, 128], [4, 4])])
    assert run.pages[7][64] == run.pages[7][128] == [4, 4]
    assert run.rewritten and run.closed == 14
    assert read(tmp_path, [EVENTS[0], closed(3, [0, 0], [2, 2])]).rewritten, "two sequences"


def test_pages_that_a_shorter_cache_no_longer_has_are_gone(tmp_path):
    run = read(tmp_path, [*EVENTS[:-1], memory(130, 1000)])
    assert list(run.pages[7]) == [0, 64, 128]
    assert run.context == 130


def test_a_plane_of_a_page_closed_before_the_trace_leaves_the_other_side_unknown(tmp_path):
    assert read(tmp_path, [EVENTS[0], shed(15, 64, "v", 4)]).pages[15] == {64: [0, 4]}


def test_context_follows_the_last_event(tmp_path):
    assert [read(tmp_path, EVENTS[:n]).context for n in (1, 2, 4, 5, 9, 11)] == [0, 384, 400, 416, 432, 448]


def test_signals_count_at_the_tiers_that_were_chosen(tmp_path):
    ema = [[9, 3, 0.5], [], [9, 0.2, 9], [0.7, 9, 9], [9, 9, 0.3], [9, 0.9, 9], [], [None, 9, 9]]
    (decision,) = read(tmp_path, [EVENTS[0], firing(4, EVENTS[8]["tiers"], 1.0, ema)]).firings
    assert EVENTS[8]["tiers"] == [[2, 2], [8, 2], [8, 4], [2, 2]]
    assert decision.drift == (Spread(0.3, 9, 9), Spread(0.7, (0.7 + 0.9) / 2, 0.9))
    nothing = read(tmp_path, [EVENTS[0], firing(4, EVENTS[8]["tiers"], 1.0, [[]] * 8, None)]).firings[0]
    assert nothing.drift == (None, None) and nothing.tau is None


def test_bytes_in_bfloat16_follow_from_bits_and_leave_other_layers_alone(tmp_path):
    first, last = read(tmp_path).memory
    assert first.bf16_bytes == 800000
    assert last.bf16_bytes == 800000 * 1.6 + 100000
    assert read(tmp_path, [EVENTS[0], memory(0, 5000, None, None)]).memory[0].bf16_bytes is None


def test_a_run_that_goes_on_or_was_cut_short(tmp_path):
    assert read(tmp_path).ended
    assert not read(tmp_path, EVENTS[:-1]).ended
    whole = json.dumps(EVENTS[8])
    for n in (1, len(whole) // 2, len(whole) - 1):
        run = read(tmp_path, EVENTS[:8], whole[:n])
        assert (run.cut_line, run.ended, len(run.firings)) == (9, False, 1)
    assert len(read(tmp_path, EVENTS[:8], whole).firings) == 2, "only the line's end is missing"


def test_fields_that_come_later_change_nothing(tmp_path):
    assert read(tmp_path, [{**event, "new": [1]} for event in EVENTS]) == read(tmp_path)


@pytest.mark.parametrize(
    ("events", "line", "words"),
    [
        ([traces.END], 1, "start event"),
        ([{**EVENTS[0], "format": "other"}], 1, "start event"),
        ([{**EVENTS[0], "version": 2}], 1, "version 2"),
        ([{**EVENTS[0], "kv_heads": [1]}], 1, "list of 4"),
        ([{**EVENTS[0], "layers": [3, 3, 7, 11]}], 1, "twice"),
        ([{k: v for k, v in EVENTS[0].items() if k != "window"}], 1, "no 'window'"),
        ([*EVENTS, EVENTS[1]], 13, "after the end"),
        ([EVENTS[0], EVENTS[0]], 2, "'start'"),
        ([EVENTS[0], {"event": "news", "seconds": 1}], 2, "'news'"),
        ([EVENTS[0], 5], 2, "None"),
        ([EVENTS[0], {"event": "closed", "seconds": 1, "layer": 3}], 2, "no 'starts'"),
        ([EVENTS[0], closed(4, [0], [2, 2])], 2, "layer 4"),
        ([EVENTS[0], closed(3, [0], [2, 3])], 2, "3 bits"),
        ([EVENTS[0], shed(3, 0, "q", 2)], 2, "damaged"),
        ([EVENTS[0], firing(4, [[2, 2]], 1.0)], 2, "1 layers"),
        ([EVENTS[0], firing(4, EVENTS[8]["tiers"], 1.0, [[1, 1, 1]])], 2, "1 smoothed"),
        ([*EVENTS[:3], {**EVENTS[3], "kinds": None}], 4, "damaged"),
    ],
)
def test_damaged_lines_are_named(tmp_path, events, line, words):
    with pytest.raises(DataError, match=rf"t\.jsonl, line {line}: .*{words}"):
        read(tmp_path, events)


def test_a_broken_line_that_is_not_the_last_is_no_cut(tmp_path):
    with pytest.raises(DataError, match="line 2: it is no JSON"):
        read(tmp_path, EVENTS[:1], '{"event": "fir\n' + json.dumps(EVENTS[1]))
    with pytest.raises(DataError, match="line 2: it is no JSON"):
        read(tmp_path, EVENTS[:1], '{"event": "fir\n')


def test_files_that_are_no_traces(tmp_path):
    file = tmp_path / "t.jsonl"
    for content, words in ((b"", "is empty"), (b'{"event": "st', "line 1"), (b"\xff\xfe\x00" * 50, "line 1")):
        file.write_bytes(content)
        with pytest.raises(DataError, match=words):
            read_trace(file)
    with pytest.raises(DataError, match="cannot read"):
        read_trace(tmp_path)


def test_a_real_run_reads_back_as_its_cache_is(traced):
    run = read_trace(traced.file)
    cache = traced.cache
    assert run.ended and [f.step for f in run.firings] == [16, 32, 48]
    for layer in cache.ours:
        held = {}
        for row in layer.store.arena.table[layer.store.sequences[0].pages].tolist():
            if row[TIER]:
                sides = [(row[FINE + side], row[FINEST + 2 * side]) for side in (0, 1)]
                held[row[START]] = [2 if fine < 0 else 4 if finest < 0 else 8 for fine, finest in sides]
        assert run.pages[layer.index] == held
        assert held[64][0] == 2 and held[64][1] == 8, "K lost its planes, V did not"
    document = as_json(run, summarise(run))
    assert document["planes_shed"]["total"] == cache.pager.planes_shed == 28
    assert document["final_tiers"] == {str(layer.index): list(cache.tiers[layer.index]) for layer in cache.ours}
    assert document["decided_bits"] == cache.controller.average_bits
    assert document["final_bytes"] == run.memory[-1].n_bytes
    assert document["bf16_bytes"] == 2 * 2 * 2 * 32 * run.memory[-1].tokens
    assert document["changes"] == {"k": {"up": 0, "down": 2}, "v": {"up": 0, "down": 2}}


def test_a_trace_of_a_cache_that_did_nothing(traced, tmp_path):
    Trace(tmp_path / "t.jsonl", traced.cache).close()
    document = as_json(run := read_trace(tmp_path / "t.jsonl"), summarise(run))
    assert document["complete"] and document["final_bytes"] is None and document["firings"] == 0
