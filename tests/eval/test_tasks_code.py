"""Where a completed function ends, what the sandbox lets pass, and what it leaves behind."""

import json
import os
import time
from pathlib import Path

import pytest

from lamina.errors import ConfigError, DataError
from lamina.eval.tasks.base import Task
from lamina.eval.tasks.code import HumanEval, function_end
from lamina.eval.tasks.sandbox import Limits, run_program
from tiny_llama import make_tokenizer

SMALL = Limits(wall_s=30, cpu_s=30, memory=256 << 20, file=1 << 16)

PROBLEMS = [
    {
        "task_id": "own/0",
        "prompt": 'def halves(numbers: list[int]) -> list[int]:\n    """The even numbers, halved."""\n',
        "entry_point": "halves",
        "test": "def check(candidate):\n    assert candidate([1, 2, 8]) == [1, 4]\n    assert candidate([]) == []\n",
        "right": "    return [n // 2 for n in numbers if n % 2 == 0]\n",
        "wrong": "    return [n // 2 for n in numbers]\n",
    },
    {
        "task_id": "own/1",
        "prompt": 'import re\n\n\ndef initials(name: str) -> str:\n    """First letters, as in A.B."""\n',
        "entry_point": "initials",
        "test": "def check(candidate):\n    assert candidate('ada b. lovelace') == 'A.B.L.'\n",
        "right": (
            "    text = '''\n\n'''\n# the words\n    words = re.findall(\n'[a-z]+', name)\n"
            "    return ''.join(w[0].upper() + '.' for w in words)\n"
        ),
        "wrong": "    return name\n",
    },
    {
        "task_id": "own/2",
        "prompt": (
            "def twice(f):\n    return lambda x: f(f(x))\n\n\n"
            'def fourth(x: float) -> float:\n    """The fourth power."""\n'
        ),
        "entry_point": "fourth",
        "test": "def check(candidate):\n    for x in range(-3, 4):\n        assert candidate(x) == x ** 4\n",
        "right": "    return twice(lambda y: y * y)(x)\n",
        "wrong": "    return x ** 3\n",
    },
]


@pytest.fixture
def task(tmp_path: Path) -> HumanEval:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
    return HumanEval(path, SMALL)


def test_right_functions_pass_whatever_follows_them_and_wrong_ones_do_not(task: HumanEval) -> None:
    items = task.items(3, 0, make_tokenizer())
    assert sorted(item.id for item in items) == ["own/0", "own/1", "own/2"] and task.name == "own"
    by_id = {problem["task_id"]: problem for problem in PROBLEMS}
    for item in items:
        problem = by_id[item.id]
        assert item.prompt == problem["prompt"]
        for after in ("", "\nx = 1 / 0\n", "\ndef check(f):\n    return\n", "\n```\nThat's it.\n", "\n\nThe 'end\n"):
            assert task.grade(item, problem["right"] + after), (item.id, after)
        for text in (
            problem["wrong"],
            "",
            "    pass",
            "    return (",
            "  return 1\n",
            "return 1\n",
            "    return '\ud800'\n",
        ):
            assert not task.grade(item, text), (item.id, text)


def test_seeds_draw_other_problems(task: HumanEval) -> None:
    protocol: Task = task
    drawn = [protocol.items(1, seed, make_tokenizer())[0] for seed in range(3)]
    assert len({item.id for item in drawn}) == 3 and drawn[1] == task.items(1, 1, make_tokenizer())[0]
    with pytest.raises(DataError, match="4 items are wanted"):
        task.items(4, 0, make_tokenizer())


@pytest.mark.parametrize(
    ("body", "rest"),
    [
        ("    return 1\n", "x = 1\n"),
        ("    return 1\n\n\n", "@wraps\ndef g(): pass\n"),
        ("    return 1\n# a comment\n", "print(f(2))\n"),
        ("    if x:\n\n        return 1\n    return (\n1,\n)\n", "f(2)"),
        ("    s = '''\nnot the end\n'''\n    return s\n", "f"),
        ("    s = 'a' \\\n'b'\n    return s\n", "f"),
        ("", "Here is the function:\n    return 1\n"),
        ("    return [1,\n2", ""),
        ("    return '''\nx = 1\n", ""),
        ("    return 1\n  y = 2\n", ""),
    ],
)
def test_a_function_ends_at_the_first_statement_that_is_not_indented(body: str, rest: str) -> None:
    prompt = 'import re\n\n\ndef f(x):\n    """Text\nthat is not indented."""\n'
    assert function_end(prompt, body + rest) == len(body)


def test_a_completion_may_begin_within_a_line() -> None:
    assert function_end("def f(x):", "\n    return 1\ng = 2") == len("\n    return 1\n")
    assert function_end("def f(x): return ", "1\ng = 2") == 2


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os\nos._exit(0)", "exited before its last line"),
        ("import sys\nsys.exit(0)", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def f(: pass", "SyntaxError"),
        ("x = '\\ud800' + 1 / 0", "ZeroDivisionError"),
        ("class E(Exception):\n    def __str__(self): return 1\nraise E", "exited before its last line"),
        ("def f(): f()\nf()", "RecursionError"),
        ("x = bytearray(1 << 29)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytes(1 << 20))", "MemoryError"),
        ("open('f', 'wb').write(bytes(1 << 20))", "OSError: [Errno 27]"),
        ("import ctypes\nctypes.string_at(0)", "killed by signal 11 (Segmentation fault)"),
        ("import os\nos.abort()", "killed by signal 6 "),
        ("import os\nos.kill(os.getppid(), 9)\nimport time\ntime.sleep(60)", "killed by signal 9 "),
        ("import os\nos.kill(os.getpid(), 40)", "killed by signal 40 "),
        ("input()", "EOFError"),
        ("import torch", "ModuleNotFoundError"),
        ("import lamina", "ModuleNotFoundError"),
        ("import os\nif os.fork(): os._exit(0)", ""),
        (
            "import os, sys\nfor fd in range(20):\n  try: os.write(fd, b'passed')\n  except OSError: pass\nos._exit(0)",
            "exited",
        ),
    ],
)
def test_a_program_that_does_not_reach_its_end_fails(program: str, reason: str) -> None:
    outcome = run_program(program, SMALL)
    assert not outcome.passed and outcome.reason.startswith(reason), outcome


@pytest.mark.parametrize(
    "program",
    [
        "",
        "import sys\nsys.stdout.write('x' * 10_000_000)\nsys.stderr.write('x' * 10_000_000)",
        "import os\nos.closerange(0, 100)",
        "import os\nassert os.listdir() == [] and os.environ['HOME'] == os.getcwd() and len(os.environ) <= 5",
        "import resource\nassert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)",
        "assert __name__ == 'solution'\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n  b: 'int'",
        "import threading as t\ntry: t.Thread(target=t.Event().wait).start()\nexcept RuntimeError: pass",
        "import os, shutil\nos.mkdir('a')\nos.chdir('a')\nshutil.rmtree('.', ignore_errors=True)",
        "import builtins, os\nbuiltins.open = os.open = os.write = None",
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)",
    ],
)
def test_a_program_that_reaches_its_end_passes(program: str) -> None:
    assert run_program(program, SMALL).passed


def test_hashes_and_so_the_order_of_sets_are_the_same_in_every_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        program = f"open({str(tmp_path / name)!r}, 'w').write(str(list(set(map(str, range(50))))))"
        assert run_program(program, SMALL).passed
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()


def test_time_ends_at_the_clock_and_at_the_processor() -> None:
    start = time.monotonic()
    outcome = run_program("import time\ntime.sleep(60)", Limits(wall_s=0.5))
    assert outcome.reason == "not done after 0.5 s" and time.monotonic() - start < 8
    ignored = (
        "import signal\nfor s in signal.valid_signals() - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass"
    )
    assert run_program(ignored, Limits(wall_s=0.5)).reason == "not done after 0.5 s"
    assert run_program("while True: pass", Limits(wall_s=60, cpu_s=1)).reason.startswith("killed by signal 24 ")


@pytest.mark.parametrize("leaves", ["", "os.setsid()", "os.setpgid(0, 0)"])
@pytest.mark.parametrize("end", ["", "while True: pass", "os._exit(0)"])
def test_no_process_outlives_a_run(tmp_path: Path, leaves: str, end: str) -> None:
    pids = tmp_path / "pids"
    program = f"""
import os, time
try:
    first = os.fork()
except OSError:
    first = 1
if first == 0:
    {leaves or "pass"}
    if os.fork():
        time.sleep(600)
    open({str(pids)!r}, "a").write(f"{{os.getpid()}} {{os.getppid()}}")
    time.sleep(600)
for _ in range(50):
    if os.path.exists({str(pids)!r}) and os.path.getsize({str(pids)!r}):
        break
    time.sleep(0.02)
{end}
"""
    assert run_program(program, Limits(wall_s=3)).passed is (end == "")
    started = [int(pid) for pid in pids.read_text().split()] if pids.exists() else []
    if not started:
        pytest.skip("this user's programs cannot fork")
    assert len(started) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in started)


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_program("open('a', 'w').write('b')", SMALL).passed and os.listdir(tmp_path) == []


def test_limits_must_limit() -> None:
    with pytest.raises(ConfigError, match="wall_s is 0"):
        Limits(wall_s=0)
    with pytest.raises(ConfigError, match="memory is -1"):
        Limits(memory=-1)
