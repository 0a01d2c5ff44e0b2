"""Evaluations that are interrupted and go on; warm-ups that touch nothing that is measured; scores by hand."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lamina.basis.calibrate import calibrate
from lamina.basis.profile import Profile
from lamina.control.config import ControllerConfig
from lamina.errors import ConfigError, DataError
from lamina.eval.arms import ARMS, Arm
from lamina.eval.log import Log
from lamina.eval.orders import order_spreads
from lamina.eval.protocol import Evaluation, Protocol
from lamina.eval.summary import as_json, as_markdown, summarise
from lamina.eval.tasks.base import Item
from lamina.pages import WindowConfig
from tiny_llama import make_model, make_tokenizer

WINDOW = WindowConfig(0, 64, 0)
LIVE = replace(ARMS["lamina-live-3"], controller=ControllerConfig(policy="threshold", tau0=2e-4, rate=1 / 4))  # type: ignore[type-var,arg-type]
CHOSEN: list[Arm] = [ARMS["bf16"], ARMS["lamina-int2"], LIVE]


@dataclass(frozen=True)
class Letters:
    """Random letters; right if the continuation begins with a letter of the first half of the bytes."""

    pool: int = 10_000
    name: str = "letters"
    max_new_tokens: int = 6
    stop: tuple[str, ...] = ()

    def items(self, n: int, seed: int, tokenizer: Any) -> list[Item]:
        numbers = [(seed * n + i) % self.pool for i in range(n)]
        return [Item(str(i), "".join(random.Random(i).choices("abcdefgh ", k=300 + 10 * (i % 3))), ()) for i in numbers]

    def grade(self, item: Item, text: str) -> bool:
        return bool(text) and ord(text[0]) % 2 == 0


@pytest.fixture(scope="module")
def answering() -> tuple[Any, Any, Profile]:
    model = make_model()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(4)
    ids = torch.randint(2, 258, (4, 1, 256), generator=torch.Generator().manual_seed(0))
    return model, make_tokenizer(), calibrate(model, iter(ids))


def run(answering: Any, path: Path, protocol: str = "frozen", after: int | None = None, **options: Any) -> Log:
    """A run, stopped by an exception once ``after`` answers of it were written."""
    log = Log(path, {"protocol": protocol})

    def progress(n: int) -> None:
        if after is not None and len([r for r in log.records if r["kind"] in ("answer", "reordered")]) == after:
            raise KeyboardInterrupt

    options = {"n": 3, "seeds": (0, 1), "warm_up": 2, "window": WINDOW, "progress": progress} | options
    evaluation = Evaluation(*answering, log, protocol=Protocol(protocol), **options)
    tasks = [Letters()]
    evaluation.run(tasks, CHOSEN)
    assert evaluation.done == evaluation.total(tasks, CHOSEN), "the progress bar ends full"
    return log


def untimed(log: Log) -> list[dict[str, Any]]:
    """Records without the seconds that answers took."""
    return [{k: x for k, x in r.items() if k != "seconds"} for r in log.records]


@pytest.mark.parametrize("protocol", ["frozen", "live"])
@pytest.mark.parametrize("after", [2, 8, 14, 17])
def test_an_interrupted_run_goes_on_to_the_same_end(answering: Any, tmp_path: Path, protocol: str, after: int) -> None:
    whole = untimed(run(answering, tmp_path / "whole.jsonl", protocol))
    assert len([r for r in whole if r["kind"] == "answer"]) == 18
    path = tmp_path / "cut.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(answering, path, protocol, after)
    assert len([r for r in Log(path, {"protocol": protocol}).records if r["kind"] == "answer"]) == after
    with path.open("ab") as file:
        file.write(b'{"kind": "answer", "task": "let')
    assert untimed(run(answering, path, protocol)) == whole
    assert untimed(run(answering, path, protocol)) == whole, "nothing is left to do"


def test_a_live_controller_changes_its_mind_and_a_frozen_one_does_not(answering: Any, tmp_path: Path) -> None:
    live = run(answering, tmp_path / "live.jsonl", "live").of(kind="answer", arm=LIVE.name)
    assert len({json.dumps(r["controller"]["tracks"]) for r in live}) == len(live)
    seldom = replace(LIVE, controller=replace(LIVE.controller, rate=1 / 16))
    log = Log(tmp_path / "seldom.jsonl", {})
    Evaluation(*answering, log, n=5, seeds=(0,), protocol=Protocol.LIVE, window=WINDOW).run([Letters()], [seldom])
    states, fired = [r["controller"] for r in log.records], [False] * 5
    for i in range(5):
        fired[i] = i == 0 or states[i]["step"] // 16 > states[i - 1]["step"] // 16
    assert ["tracks" in state for state in states] == fired and not all(fired), "else the log would grow for nothing"
    frozen = run(answering, tmp_path / "frozen.jsonl").of(kind="answer", arm=LIVE.name)
    assert len({json.dumps(r["tiers"]) for r in frozen}) == 1 and "controller" not in frozen[0]


def test_orders_of_the_same_prompts(answering: Any, tmp_path: Path) -> None:
    log = run(answering, tmp_path / "run.jsonl", "live", orders=4, seeds=(0,), n=5)
    assert {r["arm"] for r in log.of(kind="reordered")} == {LIVE.name}, "other arms answer alike in every order"
    first = log.of(kind="answer", arm=LIVE.name)
    orders = [first, *(log.of(kind="reordered", arm=LIVE.name, order=k) for k in (1, 2, 3))]
    given = [[r["item"] for r in answers] for answers in orders]
    assert {frozenset(items) for items in given} == {frozenset(given[0])} and len(set(map(tuple, given))) > 2
    steps = [answers[0]["controller"]["step"] for answers in orders]
    assert steps == [r["tokens"] for r in (answers[0] for answers in orders)], "each order starts anew"
    alone = untimed(run(answering, tmp_path / "alone.jsonl", "live", seeds=(0,), n=5))
    assert [r for r in alone if r["arm"] == LIVE.name] == [{k: r[k] for k in r if k != "seconds"} for r in first]
    (spread,) = order_spreads(log)
    assert (spread.prompts, spread.orders, spread.arm) == (5, 4, LIVE.name)
    assert spread.accuracy.values == [sum(r["right"] for r in answers) / 5 for answers in orders]
    assert spread.tiers == [[tuple(pair) for pair in answers[-1]["tiers"]] for answers in orders]


def test_an_interrupted_order_goes_on(answering: Any, tmp_path: Path) -> None:
    options: Any = {"orders": 3, "seeds": (0,), "n": 4}
    whole = untimed(run(answering, tmp_path / "whole.jsonl", "live", **options))
    assert len(whole) == 4 * 3 + 2 * 4
    for after in (13, 18):
        path = tmp_path / f"{after}.jsonl"
        with pytest.raises(KeyboardInterrupt):
            run(answering, path, "live", after, **options)
        assert untimed(run(answering, path, "live", **options)) == whole
    with pytest.raises(ConfigError, match="3 orders of prompts are for live controllers"):
        run(answering, tmp_path / "x.jsonl", "frozen", **options)


def test_warm_ups_touch_nothing_that_is_measured(answering: Any, tmp_path: Path) -> None:
    log = run(answering, tmp_path / "run.jsonl")
    warm, measured = log.of(kind="warm-up"), {r["item"] for r in log.of(kind="answer")}
    assert [w["seed"] for w in warm] == [0, 1] and all(len(w["items"]) == 2 for w in warm)
    assert not measured & {i for w in warm for i in w["items"]}
    assert warm[0]["items"] != warm[1]["items"]
    small = Evaluation(*answering, Log(tmp_path / "x", {}), n=3, seeds=(0, 1), warm_up=2, window=WINDOW)
    with pytest.raises(ConfigError, match="letters has no 2 prompts besides the 6 that are measured; lower --n"):
        small.run([Letters(pool=7)], [LIVE])


def test_the_same_prompts_in_the_same_order_for_all_arms(answering: Any, tmp_path: Path) -> None:
    log = run(answering, tmp_path / "run.jsonl")
    orders = {arm.name: [(r["seed"], r["item"]) for r in log.of(kind="answer", arm=arm.name)] for arm in CHOSEN}
    assert len({tuple(order) for order in orders.values()}) == 1
    bits = {arm.name: log.of(kind="answer", arm=arm.name)[0]["bits_history"] for arm in CHOSEN}
    assert bits["bf16"] == 16 and 2 < bits["lamina-int2"] < 5
    assert all(r["prompt_tokens"] >= 300 and r["tokens"] <= 6 for r in log.of(kind="answer"))


def test_logs_of_other_runs_and_damage(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    Log(path, {"n": 3, "seeds": [0]}).append({"kind": "answer"})
    assert Log(path, {"n": 3, "seeds": [0]}).records == [{"kind": "answer"}]
    with pytest.raises(DataError, match=r"of a run with other settings \(n\)"):
        Log(path, {"n": 4, "seeds": [0]})
    for damaged, message in (
        (b"not json\n", "line 1 is damaged"),
        (b"[1]\n", "line 1 is no record"),
        (b'{"q": 1, "a": 2}', "is no log of an evaluation"),
        (b'{"q": 1}\n{"q": 2}', "other settings"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=message):
            Log(path, {})
        assert path.read_bytes() == damaged, "not ours to change"
    path.write_bytes(b'{"run": "')
    assert Log(path, {"n": 1}).records == [] and Log(path, {"n": 1}).records == []
    with pytest.raises(DataError, match="cannot go on with"):
        Log(tmp_path, {})


def answer(arm: str, seed: int, item: str, right: bool, bits: float | None) -> dict[str, Any]:
    return {
        "kind": "answer", "task": "t", "arm": arm, "seed": seed, "item": item, "right": right, "bits_history": bits,
        "bits_at_context": 5.0,
    }  # fmt: skip


def test_scores_by_hand(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl", {})
    rules: dict[str, Callable[[int], bool]] = {
        "bf16": lambda i: i < 15,
        "worse": lambda i: i < 5,
        "part": lambda i: True,
    }
    for name, rule in rules.items():
        for i in range(20 if name != "part" else 7):
            log.append(answer(name, i // 10, str(i), rule(i), None if name == "bf16" else 2.0 + i % 2))
    exact, worse, part = summarise(log)
    assert (exact.arm, exact.n, exact.accuracy.mean, exact.by_seed) == ("bf16", 20, 0.75, [1.0, 0.5])
    assert exact.bits is None and exact.against is None and worse.bits == 2.5
    assert worse.against is not None and (worse.against.gained, worse.against.lost) == (0, 10)
    assert worse.against.p == pytest.approx(2 * 0.5**10) and part.against is None, "an unfinished arm is not compared"
    document = as_json([exact, worse, part], {"n": 10})
    assert json.loads(json.dumps(document))["scores"][1]["against"]["odds_ratio"] == 0
    table = as_markdown([exact, worse, part])
    assert "| worse | 2.50 | 5.00 | 25.0% of 20 | 11.2% to 46.9% | worse by 50.0% |" in table


def test_answers_to_other_prompts_are_not_taken_for_these(answering: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run(answering, path, n=1, seeds=(0,))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line.replace('"prompt": "', '"prompt": "0') for line in lines))
    with pytest.raises(DataError, match="answers of letters to other prompts"):
        run(answering, path, n=1, seeds=(0,))


def test_a_live_run_goes_on_in_order_or_not_at_all(answering: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run(answering, path, "live", n=3, seeds=(0,))
    lines = path.read_text().splitlines(keepends=True)
    answers = [line for line in lines if f'"arm": "{LIVE.name}"' in line]
    others = [line for line in lines if line not in answers]
    assert len(answers) == 3
    for kept in ([*others, answers[0], answers[2]], [*others, *answers[:2], answers[0]]):
        path.write_text("".join(kept))
        with pytest.raises(DataError, match="twice or out of order"):
            run(answering, path, "live", n=3, seeds=(0,))


def test_a_controller_that_has_not_fired_goes_on(answering: Any, tmp_path: Path) -> None:
    """EchoKV's begins with 16 bits."""
    arms, path = [ARMS["echokv"]], tmp_path / "run.jsonl"
    for stopped in (True, False):
        log = Log(path, {})
        progress = (lambda n: (_ for _ in ()).throw(KeyboardInterrupt) if n else None) if stopped else (lambda n: None)
        evaluation = Evaluation(*answering, log, n=2, seeds=(0,), protocol=Protocol.LIVE, progress=progress)
        if stopped:
            with pytest.raises(KeyboardInterrupt):
                evaluation.run([Letters()], arms)
        else:
            evaluation.run([Letters()], arms)
    assert [r["item"] for r in log.records] == ["0", "1"]


def test_the_models_own_settings_of_generation_do_not_count(answering: Any, tmp_path: Path) -> None:
    model = answering[0]
    plain = [r["text"] for r in run(answering, tmp_path / "a", n=2, seeds=(0,)).of(kind="answer")]
    own = model.generation_config
    model.generation_config = type(own)(**{**own.to_diff_dict(), "repetition_penalty": 3.0, "do_sample": True})
    try:
        others = [r["text"] for r in run(answering, tmp_path / "b", n=2, seeds=(0,)).of(kind="answer")]
        assert model.generation_config.repetition_penalty == 3.0
    finally:
        model.generation_config = own
    assert others == plain


def test_prompts_that_would_count_twice_are_refused(answering: Any, tmp_path: Path) -> None:
    evaluation = Evaluation(*answering, Log(tmp_path / "x", {}), n=3, seeds=(0, 1, 2), window=WINDOW)
    with pytest.raises(ConfigError, match="letters has 7 different prompts, fewer than the 9 of all seeds"):
        evaluation.run([Letters(pool=7)], [ARMS["bf16"]])
