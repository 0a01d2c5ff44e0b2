"""What ``lamina evaluate`` does: tasks over arms with all that is needed to go on after an interruption."""

import hashlib
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lamina.app.environment import environment
from lamina.app.loading import LoadedModel, load_config, load_model
from lamina.app.output import check_output
from lamina.app.screen import Screen
from lamina.basis.geometry import model_geometry
from lamina.basis.profile import Profile
from lamina.errors import ConfigError
from lamina.eval.arms import Arm, check_arms, parse_arms
from lamina.eval.log import Log
from lamina.eval.orders import as_markdown as orders_markdown
from lamina.eval.orders import order_spreads
from lamina.eval.protocol import WARM_UP, Evaluation, Protocol
from lamina.eval.summary import as_json, as_markdown, summarise
from lamina.eval.tasks.answers import Answers
from lamina.eval.tasks.base import Task
from lamina.eval.tasks.code import HumanEval
from lamina.eval.tasks.retrieval import Aggregation, Keyed, LongContext, MultiKey, MultiValue, VariableTracking
from lamina.pages import WindowConfig

RETRIEVAL = {task.kind: task for task in (MultiKey, MultiValue, VariableTracking, Aggregation)}
FILES = {"answers": Answers, "humaneval": HumanEval}


@dataclass(frozen=True)
class EvaluationRequest:
    """What to answer, and how; fields are the options of ``lamina evaluate``."""

    model: str
    profile: Path
    arms: str
    tasks: str
    output: Path
    n: int = 20
    seeds: int = 3
    protocol: str = "frozen"
    orders: int = 1
    warm_up: int = WARM_UP
    chat: bool = False
    sink: int = 64
    recent: int = 256
    dtype: str = "auto"
    device: str = "auto"


@dataclass(frozen=True)
class EvaluationReport:
    """Files that were written, and the table."""

    log: Path
    summary: Path
    table: Path
    markdown: str


@dataclass(frozen=True)
class Checked:
    """A request that can be run."""

    arms: list[Arm]
    tasks: list[Task]
    protocol: Protocol
    window: WindowConfig
    profile: Profile
    log: Path
    summary: Path
    table: Path


def check_evaluation(request: EvaluationRequest, screen: Screen | None = None) -> Checked:
    """Check every setting that can be checked without the weights."""
    arms = parse_arms(request.arms)
    tasks = parse_tasks(request.tasks, request.chat)
    protocol = _protocol(request.protocol)
    window = WindowConfig(sink=request.sink, recent=request.recent)
    for name in ("n", "seeds", "orders", "warm_up"):
        if getattr(request, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(request, name)}; it must be at least 1")
    if request.orders > 1 and protocol != Protocol.LIVE:
        raise ConfigError(f"--orders {request.orders} needs --protocol live: frozen controllers answer alike in all")
    files = [request.output / name for name in ("answers.jsonl", "summary.json", "summary.md")]
    for file in files:
        check_output(file, "-o", file.name)
    profile = Profile.load(request.profile)
    check_arms(arms, profile)
    limit = model_geometry(load_config(request.model, screen or Screen())).max_positions
    for task in tasks:
        if isinstance(task, LongContext) and task.tokens + task.max_new_tokens > limit:
            raise ConfigError(
                f"{task.name} and its answer exceed the model's {limit:,} positions; ask for fewer tokens"
            )
    return Checked(arms, tasks, protocol, window, profile, *files)


def run_evaluation(request: EvaluationRequest, screen: Screen) -> EvaluationReport:
    """Answer what is not answered yet, and write the summary; settings are checked before the weights are read."""
    checked = check_evaluation(request, screen)
    arms, tasks, protocol, window = checked.arms, checked.tasks, checked.protocol, checked.window
    profile, log_file, summary, table = checked.profile, checked.log, checked.summary, checked.table
    # Arms, tasks and orders are not among the settings: they can be added to a run.
    settings = {
        "model": request.model,
        "profile": hashlib.sha256(request.profile.read_bytes()).hexdigest()[:16],
        "n": request.n,
        "seeds": request.seeds,
        "protocol": str(protocol),
        "warm_up": request.warm_up if protocol == Protocol.FROZEN else None,
        "chat": request.chat,
        "sink": request.sink,
        "recent": request.recent,
        "dtype": request.dtype,
    }
    log = Log(log_file, settings)
    loaded = load_model(request.model, screen, dtype=request.dtype, device=request.device, profile=profile)
    _record_environment(log, request, loaded)
    run = Evaluation(
        loaded.model, loaded.tokenizer, profile, log, n=request.n, seeds=range(request.seeds), protocol=protocol,
        window=window, warm_up=request.warm_up, orders=request.orders,
    )  # fmt: skip
    total = run.total(tasks, arms)
    with screen.progress(f"Giving {total:,} answers with {len(arms)} arms", total) as run.progress:
        run.run(tasks, arms)
    scores = summarise(log)
    spreads = order_spreads(log)
    markdown = as_markdown(scores) + orders_markdown(spreads)
    screen.json(as_json(scores, settings, spreads), str(summary))
    table.write_text(markdown, encoding="utf-8")
    return EvaluationReport(log_file, summary, table, markdown)


def _record_environment(log: Log, request: EvaluationRequest, loaded: LoadedModel) -> None:
    """Note where and how the answers that follow are given, unless those before were given so too."""
    geometry = loaded.geometry
    record = {
        "kind": "environment",
        "command": command_line(request),
        **environment(loaded.model),
        "layers": geometry.n_layers,
        "packed": list(geometry.packed),
    }
    if log.of(kind="environment")[-1:] != [record]:
        log.append(record)


def command_line(request: EvaluationRequest) -> str:
    """``lamina evaluate`` with the options of a request that are not the defaults."""
    words = ["lamina", "evaluate"]
    for field in fields(request):
        value = getattr(request, field.name)
        if value != field.default:
            words += ["--" + field.name.replace("_", "-")] + ([] if value is True else [str(value)])
    return shlex.join(words)


def parse_tasks(text: str, chat: bool) -> list[Task]:
    """Tasks of a comma-separated list such as ``multi-key:2048,answers:gsm8k_test.jsonl``."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    tasks = [_task(name, chat) for name in names]
    if not tasks or len({task.name for task in tasks}) < len(tasks):
        raise ConfigError(f"--tasks {text!r} names {'a task twice' if tasks else 'no task'}; {_KNOWN}")
    return tasks


_KNOWN = f"name {', '.join(f'{kind}:TOKENS' for kind in RETRIEVAL)}, {', '.join(f'{kind}:FILE' for kind in FILES)}"


def _task(text: str, chat: bool) -> Task:
    kind, _, value = text.partition(":")
    if kind in RETRIEVAL:
        task: Any = _retrieval(text, kind, value.split(":"), chat)
    elif kind in FILES:
        if not Path(value).is_file():
            raise ConfigError(f"task {text!r} names no file; write {kind}:FILE")
        task = Answers(Path(value), chat=chat) if kind == "answers" else HumanEval(Path(value))
    else:
        raise ConfigError(f"unknown task {text!r}; {_KNOWN}")
    found: Task = task
    return found


def _retrieval(text: str, kind: str, numbers: list[str], chat: bool) -> LongContext:
    make: Any = RETRIEVAL[kind]
    if not all(x.isdecimal() for x in numbers) or int(numbers[0]) < 1:
        raise ConfigError(f"task {text!r} has no length; write {kind}:TOKENS, such as {kind}:2048")
    if len(numbers) > 1 and not (len(numbers) == 2 and issubclass(make, Keyed)):
        raise ConfigError(f"task {text!r} has too many numbers; write {kind}:TOKENS, such as {kind}:2048")
    more = {"distractors": int(numbers[1])} if len(numbers) > 1 else {}
    task: LongContext = make(int(numbers[0]), chat, **more)
    return task


def _protocol(text: str) -> Protocol:
    try:
        return Protocol(text)
    except ValueError:
        raise ConfigError(f"unknown protocol {text!r}; choose from {', '.join(Protocol)}") from None
