"""Tasks over arms, by EchoKV's protocol or live; interrupted runs go on where they stopped.

All arms answer the same prompts in the same order, and each prompt is read once for all of them. ``frozen`` (EchoKV):
an arm with a controller first answers prompts that no seed is measured on, drawn with seed + 100; the tiers that it
comes to are merged over seeds by majority, and stay. ``live``: the controller is at work throughout, and starts anew
with every seed, and with every further order of its prompts.
"""

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lamina.basis.geometry import model_geometry
from lamina.basis.profile import Profile
from lamina.control.state import Controller, merge_tiers
from lamina.engines.hf import cache_kwarg
from lamina.errors import ConfigError, DataError
from lamina.eval.arms import Arm, EchoArm, LiveArm
from lamina.eval.log import Log
from lamina.eval.reading import ReadPrompt
from lamina.eval.tasks.base import Item, Task, encode
from lamina.pages import WindowConfig

WARM_UP = 16
WARM_UP_SEED = 100
KEPT_TOKENS = 16_384
"""Tokens of the prompts that stay read while they are answered in one order after another."""


class Protocol(StrEnum):
    """What arms with a controller do."""

    FROZEN = "frozen"
    LIVE = "live"


@dataclass
class _Turn:
    """What an arm has to answer of a seed, in one order.

    Attributes
    ----------
    new : callable
        An empty cache.
    controller : Controller or None
        Shared by these caches.
    todo : set of str
        Items.
    stays : bool
        Whether the controller's tiers stay as they are.
    state : dict
        The controller's last snapshot in the log, empty without any.
    """

    arm: Arm
    new: Callable[[], Any]
    controller: Controller | None
    todo: set[str]
    stays: bool
    state: dict[str, Any] = field(default_factory=dict)

    def news(self, controller: Controller) -> dict[str, Any]:
        """The controller's snapshot; after an answer in which it did not fire, the step alone."""
        before, self.state = self.state, controller.snapshot()
        step = {"step": self.state["step"]}
        return step if before | step == self.state else self.state


class Evaluation:
    """A run of tasks over arms.

    Parameters
    ----------
    model, tokenizer, profile
        What answers; in evaluation mode.
    log : Log
        Where answers go, and which are there already.
    n : int
        Prompts of each task and seed.
    seeds : sequence of int
        Draws of prompts.
    protocol : Protocol
        Of arms with a controller.
    window : WindowConfig
        Exact windows.
    warm_up : int
        Prompts of a warm-up.
    orders : int
        Orders of each seed's prompts in which live controllers answer them; the first is that of all arms.
    progress : callable, optional
        Called with the number of answers that are there, of :meth:`total`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        profile: Profile,
        log: Log,
        *,
        n: int,
        seeds: Sequence[int],
        protocol: Protocol = Protocol.FROZEN,
        window: WindowConfig | None = None,
        warm_up: int = WARM_UP,
        orders: int = 1,
        progress: Callable[[int], Any] = lambda n: None,
    ) -> None:
        if orders > 1 and protocol != Protocol.LIVE:
            raise ConfigError(f"{orders} orders of prompts are for live controllers; frozen ones answer alike in all")
        self.model, self.tokenizer, self.profile, self.log = model, tokenizer, profile, log
        self.n, self.seeds, self.protocol, self.warm_up = n, list(seeds), protocol, warm_up
        self.orders, self.window, self.progress = orders, window or WindowConfig(), progress
        self.done = 0
        self.kept: dict[str, ReadPrompt] = {}

    def total(self, tasks: Sequence[Task], arms: Sequence[Arm]) -> int:
        """Answers that :meth:`run` gives, warm-ups among them."""
        live = sum(map(_decides, arms))
        warm = live * self.warm_up if self.protocol == Protocol.FROZEN else 0
        return len(tasks) * len(self.seeds) * (self.n * (len(arms) + live * (self.orders - 1)) + warm)

    def run(self, tasks: Sequence[Task], arms: Sequence[Arm]) -> None:
        """Answer everything that the log does not hold yet."""
        for arm in arms:
            if isinstance(arm, LiveArm):
                arm.settings(self.profile)
        drawn = [{seed: task.items(self.n, seed, self.tokenizer) for seed in self.seeds} for task in tasks]
        for task, items in zip(tasks, drawn):
            _check_distinct(task, items)
        # What the model's own settings of generation add, such as penalties, beams or time limits, would count as ours.
        own = self.model.generation_config
        self.model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id, bos_token_id=own.bos_token_id
        )
        try:
            for task, items in zip(tasks, drawn):
                self._run_task(task, arms, items)
        finally:
            self.model.generation_config = own

    def _run_task(self, task: Task, arms: Sequence[Arm], items: dict[int, list[Item]]) -> None:
        live = [arm for arm in arms if _decides(arm)]
        frozen: dict[str, list[tuple[int, int]]] = {}
        if self.protocol == Protocol.FROZEN:
            measured = {item.id for drawn in items.values() for item in drawn}
            for seed in self.seeds if live else ():
                self._warm_up(task, live, seed, measured)
            for arm in live:
                warm = [self._warmed(task, arm, seed)[0] for seed in self.seeds]
                frozen[arm.name] = merge_tiers([[(k, v) for k, v in r["tiers"]] for r in warm])
        for seed in self.seeds:
            for order in range(self.orders):
                given = in_order(items[seed], f"{task.name}-{seed}-{order}") if order else items[seed]
                turns = [self._turn(task, arm, seed, order, given, frozen) for arm in (live if order else arms)]
                self._answer_all(task, seed, order, given, turns)
            self.kept.clear()

    def _turn(
        self, task: Task, arm: Arm, seed: int, order: int, items: list[Item], frozen: dict[str, list[tuple[int, int]]]
    ) -> _Turn:
        """Where an arm stands."""
        done = self._done(task, arm, seed, order)
        works = _decides(arm) and arm.name not in frozen
        self._check_done(task, items, done, in_order=works)
        self._count(len(done))
        new = arm.open(self.model, arm.profile(self.profile), self.window)
        controller = _controller_of(new()) if _decides(arm) else None
        if controller is not None and not works:
            controller.tiers = list(frozen[arm.name])
            controller.freeze()
        elif controller is not None and done:
            whole = next(r["controller"] for r in reversed(done) if "tracks" in r["controller"])
            controller.load(whole | done[-1]["controller"])
        turn = _Turn(arm, new, controller, {item.id for item in items} - {r["item"] for r in done}, not works)
        if controller is not None and done:
            turn.news(controller)
        return turn

    def _answer_all(self, task: Task, seed: int, order: int, items: list[Item], turns: list[_Turn]) -> None:
        for item in items:
            waiting = [turn for turn in turns if item.id in turn.todo]
            if not waiting:
                continue
            read = self._read(task, item)
            for turn in waiting:
                record = _key(task, turn.arm, seed, order) | {"item": item.id, "prompt": _digest(item)}
                record |= {"simulated": turn.arm.simulated, **self._answer(task, item, read, turn.new())}
                if turn.controller is not None:
                    record["tiers"] = [list(pair) for pair in turn.controller.tiers]
                    if not turn.stays:
                        record["controller"] = turn.news(turn.controller)
                self.log.append(record)
                self._count(1)

    def _done(self, task: Task, arm: Arm, seed: int, order: int) -> list[dict[str, Any]]:
        return self.log.of(**_key(task, arm, seed, order))

    def _count(self, n: int) -> None:
        self.done += n
        self.progress(self.done)

    def _check_done(self, task: Task, items: list[Item], done: list[dict[str, Any]], in_order: bool) -> None:
        """Raise DataError unless the log's answers are to these prompts, for live controllers to the first of them."""
        known = {item.id: _digest(item) for item in items}
        if any(known.get(r["item"]) != r.get("prompt") for r in done):
            raise DataError(
                f"{self.log.path} has answers of {task.name} to other prompts: the task's file has changed, or "
                "another one has its name; choose another folder"
            )
        given = [r["item"] for r in done]
        if len(set(given)) < len(given) or (in_order and given != [item.id for item in items[: len(given)]]):
            raise DataError(
                f"{self.log.path} has answers of {task.name} twice or out of order, as if two runs had written it; "
                "choose another folder"
            )

    def _warmed(self, task: Task, arm: Arm, seed: int) -> list[dict[str, Any]]:
        return self.log.of(kind="warm-up", task=task.name, arm=arm.name, seed=seed)

    def _warm_up(self, task: Task, arms: Sequence[Arm], seed: int, measured: set[str]) -> None:
        """Note the tiers that controllers come to on prompts that are not measured, unless the log has them."""
        cold = [arm for arm in arms if not self._warmed(task, arm, seed)]
        self._count(self.warm_up * (len(arms) - len(cold)))
        if not cold:
            return
        new = {arm.name: arm.open(self.model, arm.profile(self.profile), self.window) for arm in cold}
        controllers = {name: _controller_of(cache()) for name, cache in new.items()}
        items = self._others(task, seed + WARM_UP_SEED, measured)
        for item in items:
            read = self._read(task, item)
            for cache in new.values():
                self._answer(task, item, read, cache())
                self._count(1)
        for name, controller in controllers.items():
            self.log.append(
                {"kind": "warm-up", "task": task.name, "arm": name, "seed": seed,
                 "tiers": [list(pair) for pair in controller.tiers], "items": [item.id for item in items]}
            )  # fmt: skip

    def _others(self, task: Task, seed: int, measured: set[str]) -> list[Item]:
        """Prompts that no seed is measured on."""
        found: dict[str, Item] = {}
        for further in range(WARM_UP_SEED):
            try:
                drawn = task.items(self.warm_up, seed + WARM_UP_SEED * further, self.tokenizer)
            except DataError:
                break
            found |= {item.id: item for item in drawn if item.id not in measured}
            if len(found) >= self.warm_up:
                return list(found.values())[: self.warm_up]
        raise ConfigError(
            f"{task.name} has no {self.warm_up} prompts besides the {len(measured)} that are measured; lower --n"
        )

    def _read(self, task: Task, item: Item) -> ReadPrompt:
        """A prompt as all arms read it."""
        if item.id in self.kept:
            return self.kept[item.id]
        ids = torch.tensor([encode(self.tokenizer, item.prompt)], device=self.model.device)
        limit = model_geometry(self.model.config).max_positions
        if ids.shape[1] + task.max_new_tokens > limit:
            raise DataError(
                f"prompt {item.id} of {task.name} has {ids.shape[1]:,} tokens, with its answer more than the model's "
                f"{limit:,} positions; leave it out"
            )
        read = ReadPrompt(self.model, ids)
        if self.orders > 1 and ids.shape[1] + sum(r.ids.shape[1] for r in self.kept.values()) <= KEPT_TOKENS:
            self.kept[item.id] = read
        return read

    @torch.no_grad()
    def _answer(self, task: Task, item: Item, read: ReadPrompt, cache: Any) -> dict[str, Any]:
        """The continuation of a prompt, graded, and what the cache took."""
        ids = read.ids
        start = time.perf_counter()
        read.fill(cache)
        stop = {"stop_strings": list(task.stop), "tokenizer": self.tokenizer} if task.stop else {}
        out = self.model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=task.max_new_tokens,
            **stop, **cache_kwarg(self.model, cache),
        )  # fmt: skip
        seconds = time.perf_counter() - start
        text = str(self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
        bits, memory = cache.bits(), cache.memory()
        # The last token is written, not read.
        bf16 = 2 * model_geometry(self.model.config).elements(out.shape[1] - 1) + memory.get("host_layers", 0)
        return {
            "right": bool(task.grade(item, text)), "text": text, "prompt_tokens": ids.shape[1],
            "tokens": out.shape[1] - ids.shape[1], "seconds": round(seconds, 4),
            "bits_history": _number(bits["history"]), "bits_at_context": _number(bits["context"]),
            "tier_mean": _number(cache.average_tier),
            "kv_bytes": sum(memory.values()), "kv_bytes_by_kind": memory, "kv_bytes_bf16": bf16,
        }  # fmt: skip


def in_order(items: Sequence[Item], seed: str) -> list[Item]:
    """Items in an order that a seed gives."""
    return random.Random(seed).sample(items, len(items))


def _key(task: Task, arm: Arm, seed: int, order: int) -> dict[str, Any]:
    """What answers of an arm have in common; those in a further order are not answers of their own."""
    first = {"kind": "answer", "task": task.name, "arm": arm.name, "seed": seed}
    return first if not order else first | {"kind": "reordered", "order": order}


def _decides(arm: Arm) -> bool:
    """Whether a controller chooses the arm's tiers."""
    return isinstance(arm, LiveArm | EchoArm)


def _controller_of(cache: Any) -> Controller:
    controller: Controller = cache.controller
    return controller


def _number(x: float) -> float | None:
    return float(x) if x == x else None


def _digest(item: Item) -> str:
    return hashlib.sha256(item.prompt.encode("utf-8", "replace")).hexdigest()[:16]


def _check_distinct(task: Task, items: dict[int, list[Item]]) -> None:
    """Raise ConfigError if a prompt would count twice."""
    ids = [item.id for drawn in items.values() for item in drawn]
    if len(set(ids)) < len(ids):
        raise ConfigError(
            f"{task.name} has {len(set(ids))} different prompts, fewer than the {len(ids)} of all seeds; "
            "lower --n or --seeds"
        )
