"""A real server under test: start, ask, look at its evidence, stop. One at a time: an idle scheduler burns a core."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

START_SECONDS = 240
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that wait do not spin: on a machine with other work, spinning makes every step ten times slower."""
STOCK = (
    *("--attention-backend", "torch_native", "--max-total-tokens", "40000"),
    *("--disable-radix-cache", "--disable-overlap-schedule"),
)
"""Stock SGLang as the reference: no prefix reuse and no overlap, like ours. (With overlap, stock penalises a token one step
late.)"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """One SGLang server process tree on 127.0.0.1.

    Args:
        model: folder of the model.
        flags: further command-line flags.
        log: file for its output.
        kvdrive: start with `--kv-manager kvdrive`, else stock (`STOCK` is the caller's to add).
        command: program and subcommand, by default `python -m sglang.launch_server`.
        env: environment beside ours.
        checked: with SGLang's strict memory checks, and patient with other work on the machine; a benchmark wants neither.
    """

    def __init__(self, model, flags=(), *, log: Path, kvdrive: bool = True, command=None, env=None, checked: bool = True):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        manager = ("--kv-manager", "kvdrive") if kvdrive else ()
        arguments = ("--model-path", str(model), "--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu")
        command = command or (sys.executable, "-m", "sglang.launch_server")
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                (*command, *arguments, "--random-seed", "0", *manager, *flags),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **({**STRICT, **PATIENT} if checked else {}), **(env or {})},
            )
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"server ended with {self.process.returncode}:\n{self.tail()}")
            try:
                if self.get("/health", timeout=2)[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.5)
        raise RuntimeError(f"server not ready after {START_SECONDS} s:\n{self.tail()}")

    def tail(self, n: int = 4000) -> str:
        return self.log.read_text(errors="replace")[-n:]

    # -- asking ----------------------------------------------------------------------------------------------------

    def request(self, path: str, body=None, *, timeout: float = 300, method: str | None = None):
        """(status, parsed JSON or text). HTTP errors are answers, not exceptions."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                status, text = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def get(self, path: str, *, timeout: float = 60):
        return self.request(path, timeout=timeout)

    def post(self, path: str, body: dict, *, timeout: float = 300):
        return self.request(path, body, timeout=timeout)

    def generate(self, prompt, max_new_tokens: int = 16, *, timeout: float = 600, expect: int = 200, **options):
        """`/generate` with a text or a list of token ids, greedy, ignoring EOS unless told otherwise."""
        sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True, **options.pop("sampling", {})}
        key = "text" if isinstance(prompt, str) else "input_ids"
        status, answer = self.post("/generate", {key: prompt, "sampling_params": sampling, **options}, timeout=timeout)
        assert status == expect, (status, answer, self.tail(1500))
        return answer

    def generate_many(self, prompts, max_new_tokens: int = 16, **options) -> list:
        """All at the same time."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, max_new_tokens, **options), prompts))

    def stream(self, path: str, body: dict, *, timeout: float = 300):
        """Parsed `data:` events of a streamed answer, as they come; stops at `[DONE]`."""
        request = urllib.request.Request(
            self.url + path, json.dumps({**body, "stream": True}).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            for line in response:
                if line.startswith(b"data:"):
                    text = line[5:].strip().decode()
                    if text == "[DONE]":
                        return
                    yield json.loads(text)

    # -- evidence -----------------------------------------------------------------------------------------------------

    def state(self) -> dict:
        """Our part of `/server_info`."""
        status, info = self.get("/server_info")
        assert status == 200, info
        return info["internal_states"][0]["kvdrive"]

    def counted(self, before: dict) -> dict:
        """What the counters grew by since `before` (an earlier `state()`)."""
        return {name: value - before[name] for name, value in self.state().items() if isinstance(value, int) and name in before}

    def wait_idle(self, seconds: float = 30) -> dict:
        """Wait until no request holds anything in any tier; the state at that moment."""
        deadline = time.monotonic() + seconds
        while True:
            state = self.state()
            used = [tier["used_bytes"] for tier in state["tiers"].values()]
            if not any(used) and state["sequences"] == 0:
                return state
            assert time.monotonic() < deadline, f"still held after {seconds} s: {state['tiers']}, {state['sequences']} sequences"
            time.sleep(0.2)

    def assert_alive(self) -> None:
        """Same process, healthy, and nothing in the log that only a fault writes."""
        assert self.process.poll() is None, self.tail()
        assert self.get("/health")[0] == 200
        text = self.log.read_text(errors="replace").lower()
        for sign in ("traceback", "memory leak", "scheduler hit an exception"):
            assert sign not in text, self.tail()

    @contextlib.contextmanager
    def frozen(self):
        """The schedulers stand still, as on a machine of any slowness; HTTP and the tokenizer go on."""
        schedulers = [process for process in self.tree() if process.name().startswith("sglang::sched")]
        assert schedulers, [process.name() for process in self.tree()]
        for process in schedulers:
            process.suspend()
        try:
            yield
        finally:
            for process in schedulers:
                process.resume()

    # -- stopping -------------------------------------------------------------------------------------------------------

    def tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        family = self.tree()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=8)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=8)
        self.process.wait(timeout=10)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_error) -> None:
        self.stop()
