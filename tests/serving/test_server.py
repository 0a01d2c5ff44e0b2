"""vLLM's API server with Lamina, whose processes are killed while a request runs."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

pytest.importorskip("vllm", reason="vLLM is tested in an environment of its own: make test-vllm")

import httpx
import psutil

from lamina import Controller, ControllerConfig
from tiny_llama import save_tiny

PROMPT, GENERATED, READ = "hello " * 100, 100, 30
SETTINGS = {"target_bits": 3.0, "rate": 0.25}


class Server:
    """A server as a user starts it, and its processes."""

    def __init__(self, folder):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        lamina = {
            "profile": str(folder / "model.profile"), "controller": SETTINGS,
            "controller_state": str(folder / "state.json"),
        }  # fmt: skip
        self.log = folder / f"{self.port}.log"
        self.model = str(folder / "model")
        with self.log.open("w") as log:
            # Without a timeout, vLLM kills its workers when it is asked to end, and they save nothing.
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model, "--port",
                    str(self.port), "--block-size", "64", "--dtype", "float32", "--enforce-eager", "--max-num-seqs",
                    "4", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(200 << 20), "--shutdown-timeout",
                    "30", "--additional-config", json.dumps({"lamina": lamina}),
                ],
                stdout=log, stderr=log,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
                     "OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            )  # fmt: skip
        self.children = []
        end = time.monotonic() + 120
        while not self.is_up():
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.2)
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def is_up(self):
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health").status_code == 200
        except httpx.HTTPError:
            return False

    def ask(self, tokens):
        """Lines of a streamed answer as they come."""
        body = {
            "model": self.model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True,
        }  # fmt: skip
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            yield from (json.loads(x[6:]) for x in answer.iter_lines() if x.startswith("data: {"))

    def kill(self, name):
        """Kill one of its processes without a word."""
        (victim,) = [p for p in self.children if p.name() == name]
        os.kill(victim.pid, signal.SIGKILL)

    def wait(self):
        """Until all its processes are gone."""
        self.process.wait(60)
        end = time.monotonic() + 60
        while any(map(_runs, self.children)):
            assert time.monotonic() < end, "a process outlives its server"
            time.sleep(0.1)

    def end(self):
        """Whatever happened, leave no process behind."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.children = self.children or psutil.Process(self.process.pid).children(recursive=True)
        for process in [self.process, *self.children]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(10)


def _runs(process):
    """Whether a process does anything yet; those without a parent may stay listed for good."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start(tmp_path):
    """Starts servers over a tiny model, one after the other."""
    save_tiny(tmp_path / "model", tmp_path / "model.profile")
    started = []

    def begin():
        started.append(Server(tmp_path))
        return started[-1]

    yield begin
    for server in started:
        server.end()


def state_of(path):
    """A state that is whole, as a controller takes it."""
    found = json.loads(path.read_text())
    controller = Controller(ControllerConfig(**SETTINGS), [(2, 2)] * 2)
    controller.load(found)
    assert all(track.ema for track in controller.tracks)
    return controller


def killed_while_it_answers(server, name):
    answer = server.ask(3000)
    for _ in range(READ):
        assert "choices" in next(answer)
    server.kill(name)
    began = time.monotonic()
    last = list(answer)[-1]
    assert last["error"]["code"] == 500 and "EngineCore encountered an issue" in last["error"]["message"]
    server.wait()
    assert time.monotonic() - began < 60
    assert "EngineDeadError" in server.log.read_text()


def test_a_controllers_state_outlives_processes_that_are_killed(start, tmp_path):
    path = tmp_path / "state.json"
    server = start()
    assert len(list(server.ask(GENERATED))) >= GENERATED
    server.process.send_signal(signal.SIGTERM)
    server.wait()
    before = state_of(path)
    assert before.step >= GENERATED - 1
    # The worker holds the state: what it had is lost, what was written is not.
    server = start()
    killed_while_it_answers(server, "VLLM::Worker")
    after = state_of(path)
    assert after.step >= before.step
    # A worker whose engine is killed saves its state before it goes. It went on from the one before.
    server = start()
    killed_while_it_answers(server, "VLLM::EngineCore")
    assert state_of(path).step >= after.step + READ
