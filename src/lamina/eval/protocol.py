"""Tasks over arms, by EchoKV's protocol or live; interrupted runs go on where they stopped.

All arms answer the same prompts in the same order. ``frozen`` (EchoKV): an arm with a controller first answers prompts
that no seed is measured on, drawn with seed + 100; the tiers that it comes to are merged over seeds by majority, and
stay. ``live``: the controller is at work throughout, and starts anew with every seed, which is one order of prompts.
"""

import hashlib
from collections.abc import Callable, Sequence
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
from lamina.eval.tasks.base import Item, Task, encode
from lamina.pages import WindowConfig

WARM_UP = 16
WARM_UP_SEED = 100


class Protocol(StrEnum):
    """What arms with a controller do."""

    FROZEN = "frozen"
    LIVE = "live"


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
    progress : callable, optional
        Called with 1 for every prompt that is done.
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
        progress: Callable[[int], Any] = lambda n: None,
    ) -> None:
        self.model, self.tokenizer, self.profile, self.log = model, tokenizer, profile, log
        self.n, self.seeds, self.protocol, self.warm_up = n, list(seeds), protocol, warm_up
        self.window, self.progress = window or WindowConfig(), progress

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
                for arm in arms:
                    self._run_arm(task, arm, items)
        finally:
            self.model.generation_config = own

    def _run_arm(self, task: Task, arm: Arm, items: dict[int, list[Item]]) -> None:
        derived = arm.profile(self.profile)
        live = isinstance(arm, LiveArm | EchoArm)
        merged = None
        if live and self.protocol == Protocol.FROZEN:
            measured = {item.id for drawn in items.values() for item in drawn}
            merged = merge_tiers([self._warm_up(task, arm, derived, seed, measured) for seed in self.seeds])
        for seed in self.seeds:
            done = self.log.of(kind="answer", task=task.name, arm=arm.name, seed=seed)
            self._check_done(task, items[seed], done, in_order=live and merged is None)
            self.progress(len(done))
            todo = [item for item in items[seed] if item.id not in {r["item"] for r in done}]
            if not todo:
                continue
            new = arm.open(self.model, derived, self.window)
            controller = _controller_of(new()) if live else None
            if controller is not None and merged is not None:
                controller.tiers = list(merged)
                controller.freeze()
            elif controller is not None and done:
                controller.load(done[-1]["controller"])
            for item in todo:
                record = {"kind": "answer", "task": task.name, "arm": arm.name, "seed": seed, "item": item.id}
                record |= {"prompt": _digest(item), "simulated": arm.simulated}
                record |= self._answer(task, item, new())
                if controller is not None:
                    record["tiers"] = [list(pair) for pair in controller.tiers]
                    if merged is None:
                        record["controller"] = controller.snapshot()
                self.log.append(record)
                self.progress(1)

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

    def _warm_up(self, task: Task, arm: Arm, derived: Profile, seed: int, measured: set[str]) -> list[tuple[int, int]]:
        """Tiers that a controller comes to on prompts that are not measured."""
        known = self.log.of(kind="warm-up", task=task.name, arm=arm.name, seed=seed)
        if not known:
            new = arm.open(self.model, derived, self.window)
            controller = _controller_of(new())
            items = self._others(task, seed + WARM_UP_SEED, measured)
            for item in items:
                self._answer(task, item, new())
            tiers = [list(pair) for pair in controller.tiers]
            self.log.append(
                {"kind": "warm-up", "task": task.name, "arm": arm.name, "seed": seed, "tiers": tiers,
                 "items": [item.id for item in items]}
            )  # fmt: skip
            known = self.log.records[-1:]
        return [(k, v) for k, v in known[0]["tiers"]]

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

    @torch.no_grad()
    def _answer(self, task: Task, item: Item, cache: Any) -> dict[str, Any]:
        """The continuation of a prompt, graded, and what the cache took."""
        ids = torch.tensor([encode(self.tokenizer, item.prompt)], device=self.model.device)
        limit = model_geometry(self.model.config).max_positions
        if ids.shape[1] + task.max_new_tokens > limit:
            raise DataError(
                f"prompt {item.id} of {task.name} has {ids.shape[1]:,} tokens, with its answer more than the model's "
                f"{limit:,} positions; leave it out"
            )
        stop = {"stop_strings": list(task.stop), "tokenizer": self.tokenizer} if task.stop else {}
        out = self.model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=task.max_new_tokens,
            **stop, **cache_kwarg(self.model, cache),
        )  # fmt: skip
        text = str(self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
        bits, memory = cache.bits(), cache.memory()
        # The last token is written, not read.
        bf16 = 2 * model_geometry(self.model.config).elements(out.shape[1] - 1) + memory.get("host_layers", 0)
        return {
            "right": bool(task.grade(item, text)), "text": text, "prompt_tokens": ids.shape[1],
            "tokens": out.shape[1] - ids.shape[1], "bits_history": _number(bits["history"]),
            "bits_at_context": _number(bits["context"]), "tier_mean": _number(cache.average_tier),
            "kv_bytes": sum(memory.values()), "kv_bytes_by_kind": memory, "kv_bytes_bf16": bf16,
        }  # fmt: skip


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
