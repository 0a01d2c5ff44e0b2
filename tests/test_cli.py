"""The command line itself: exit codes, streams and messages; commands are tested in ``tests/app``."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lamina import __version__, cli
from lamina.app import doctor
from lamina.errors import ConfigError

COMMANDS = ("calibrate", "generate", "fidelity", "plan", "doctor", "inspect", "trace", "demo")


def run(*args):
    return CliRunner().invoke(cli.app, list(args))


def failing_doctor(monkeypatch, error):
    def examine():
        raise error

    monkeypatch.setattr(doctor, "examine", examine)


def test_version():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"lamina {__version__}\n")


def test_help_names_every_command():
    result = run("--help")
    assert result.exit_code == 0
    assert all(f" {name} " in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--help" in result.stdout


def test_an_error_of_ours_is_one_paragraph_on_stderr(monkeypatch):
    failing_doctor(monkeypatch, ConfigError("first line [red]\nsecond line " + "long " * 50))
    result = run("doctor")
    assert result.exit_code == cli.FAILURE
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("Error: first line [red] second line long")
    assert "Traceback" not in result.stderr


def test_any_other_error_keeps_its_traceback(monkeypatch):
    failing_doctor(monkeypatch, RuntimeError("a bug"))
    result = run("doctor")
    assert result.exit_code == 1
    assert isinstance(result.exception, RuntimeError)


def test_control_c_ends_without_a_traceback(monkeypatch):
    failing_doctor(monkeypatch, KeyboardInterrupt())
    result = run("doctor")
    assert result.exit_code == 130
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("args", [(), ("nonsense",), ("plan",), ("generate", "m"), ("doctor", "--no-such-option")])
def test_usage_errors(args):
    result = run(*args)
    assert result.exit_code == 2
    assert "Usage" in result.output


def test_starting_the_command_does_not_import_torch():
    code = "import sys, lamina.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("before", "after"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_threads_give_their_core_back_unless_told_otherwise(monkeypatch, before, after):
    monkeypatch.setattr(cli, "app", lambda prog_name: None)
    monkeypatch.setenv("OMP_WAIT_POLICY", "") if before is None else monkeypatch.setenv("OMP_WAIT_POLICY", before)
    if before is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    cli.main()
    assert os.environ["OMP_WAIT_POLICY"] == after
