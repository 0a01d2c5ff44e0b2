"""The processes of :mod:`lamina.eval.tasks.sandbox`, run as a script: a supervisor, and a worker for the program.

The script uses the standard library alone, for it runs without site packages.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from types import ModuleType
from typing import Any, NoReturn

TIMED_OUT = 124
SIGNALLED = 128
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_REASON_CHARS = 500


def main() -> NoReturn:
    """Read a job as JSON from standard input, run it, end every process it started, and exit with how it ended."""
    job = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Orphans of the worker become children of this process, even those that left its process group.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if worker == 0:
        try:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            _work(job)
        finally:
            os._exit(1)
    code = _watch(worker, job["wall_s"])
    _end_all(worker)
    os._exit(code)


def _watch(worker: int, wall_s: float) -> int:
    """Wait until the worker has ended or its time is over; it is not reaped, so that its id stays its own."""

    def overdue(*_: Any) -> NoReturn:
        raise TimeoutError

    signal.signal(signal.SIGALRM, overdue)
    try:
        signal.setitimer(signal.ITIMER_REAL, wall_s)
        ended = os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except TimeoutError:
        return TIMED_OUT
    return SIGNALLED + ended.si_status if ended and ended.si_code != os.CLD_EXITED else 0


def _end_all(worker: int) -> None:
    """Kill the worker's group at once, then children until none is left."""
    try:
        os.killpg(worker, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(worker, signal.SIGKILL)
    while True:
        for child in _children():
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Processes whose parent is this one."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == os.getpid():
            found.append(int(name))
    return found


def _work(job: dict[str, Any]) -> None:
    """Run the program under its limits, then write the nonce, or why not."""
    os.setpgid(0, 0)
    cpu = job["cpu_s"]
    _limit(resource.RLIMIT_CPU, cpu, cpu + 1)
    _limit(resource.RLIMIT_AS, job["memory"], job["memory"])
    _limit(resource.RLIMIT_FSIZE, job["file"], job["file"])
    _limit(resource.RLIMIT_CORE, 0, 0)
    _limit(resource.RLIMIT_NPROC, 0, 0)
    me, opened, written = os.getpid(), os.open, os.write
    solution = sys.modules["solution"] = ModuleType("solution")
    try:
        exec(compile(job["program"], "solution.py", "exec"), solution.__dict__)
        verdict = job["nonce"]
    except BaseException as error:
        verdict = f"{type(error).__name__}: {error}"[:_REASON_CHARS]
    # A copy of the worker that the program forked comes here as well.
    if os.getpid() == me:
        written(opened(job["verdict"], os.O_WRONLY | os.O_CREAT, 0o600), verdict.encode("utf-8", "replace"))


def _limit(kind: int, soft: int, hard: int) -> None:
    """Lower a limit; one that is lower already stays."""
    most = resource.getrlimit(kind)[1]
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(kind, (soft, hard))


if __name__ == "__main__":
    main()
