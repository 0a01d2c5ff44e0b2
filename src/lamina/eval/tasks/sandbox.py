"""Run a program that a model wrote, in processes of its own with limits, and learn whether it ran to its end.

What it is for: mistakes. An endless loop, a memory hog, a fork, a print without end, an early ``exit`` or ``os._exit``
and a crash of the interpreter leave no process, file or core behind, and pass only if the program ran to its end.

How a pass is told: the program runs inside a worker that, once the last line has returned, writes a random nonce to a
file outside the program's working directory. Nothing that a program prints or exits with stands for it.

What it does not stop: **this is no security boundary.** The program has the rights of the user who runs it. It can read
that user's files, write wherever that user may (many files, each up to a limit), use the network, and signal other
processes of that user. One that kills its supervisor ends as a failure, but those of its processes that left its group
live on. The limit on processes does not bind root, and memory is limited for each process, not for all together. The
nonce is in the memory of the process that runs the program: code that searches the frames of its callers finds it and
can pass without doing the work, and so can code that replaces what the tests rely on, such as a result that equals
everything. Code that may be hostile belongs in a virtual machine.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from lamina.errors import ConfigError
from lamina.eval.tasks import sandbox_child

_GRACE_S = 10.0
_VERDICT_BYTES = 4096


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes
    ----------
    wall_s : float
        Seconds from start to end.
    cpu_s : int
        Seconds of processor time of each process.
    memory : int
        Bytes of address space of each process; Python alone takes about 20 MB.
    file : int
        Bytes of each file that it writes.
    """

    wall_s: float = 10.0
    cpu_s: int = 10
    memory: int = 1 << 30
    file: int = 1 << 20

    def __post_init__(self) -> None:
        """Refuse limits that are no limits.

        Raises
        ------
        ConfigError
            One is not positive.
        """
        for name, value in asdict(self).items():
            if not value > 0:
                raise ConfigError(f"limit {name} is {value}; it must be positive.")


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes
    ----------
    passed : bool
        Its last line returned.
    reason : str
        Why it did not: the exception, the signal, the time limit, or an early exit; empty for a pass.
    """

    passed: bool
    reason: str = ""


def run_program(program: str, limits: Limits) -> Outcome:
    """Run Python source to its end, or to a limit.

    It sees the standard library, a fixed hash seed, an empty working directory, nothing on standard input, and no
    variables of this process's environment. What it prints is thrown away.

    Parameters
    ----------
    program : str
        Source; its ``__name__`` is ``solution``.
    limits : Limits
        What it may use.

    Raises
    ------
    ConfigError
        The system is not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError(f"the system is {sys.platform}, and programs are run with limits of Linux. Use Linux.")
    with TemporaryDirectory(prefix="lamina-", ignore_cleanup_errors=True) as folder:
        work, verdict = Path(folder, "work"), Path(folder, "verdict")
        work.mkdir()
        nonce = secrets.token_hex(16)
        job = {**asdict(limits), "program": program, "nonce": nonce, "verdict": str(verdict)}
        code = _supervise(json.dumps(job).encode(), work, limits)
        written = _read(verdict)
    if written == nonce and code == 0:
        return Outcome(True)
    if code == sandbox_child.TIMED_OUT:
        return Outcome(False, f"not done after {limits.wall_s:g} s")
    if code > sandbox_child.SIGNALLED:
        number = code - sandbox_child.SIGNALLED
        return Outcome(False, f"killed by signal {number} ({signal.strsignal(number)})")
    return Outcome(False, written or "exited before its last line")


def _supervise(job: bytes, work: Path, limits: Limits) -> int:
    """Exit code of the supervisor; it ends with this process, and ends the program with it."""
    # The whole environment is given here, so -E, which would ignore the hash seed, is not needed.
    command = [sys.executable, "-P", "-s", "-S", "-B", sandbox_child.__file__]
    environment = {"HOME": str(work), "TMPDIR": str(work), "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"}
    process = subprocess.Popen(
        command,
        cwd=work,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.communicate(job, timeout=limits.wall_s + _GRACE_S)
    except subprocess.TimeoutExpired:
        return sandbox_child.TIMED_OUT
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    # A supervisor that was itself killed has a negative code.
    return process.returncode if process.returncode >= 0 else sandbox_child.SIGNALLED - process.returncode


def _read(verdict: Path) -> str:
    """What the worker wrote; nothing else that may lie there is followed or waited for."""
    try:
        file = os.open(verdict, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        return os.read(file, _VERDICT_BYTES).decode("utf-8", "replace")
    finally:
        os.close(file)
