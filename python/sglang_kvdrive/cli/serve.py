"""What `make serve` runs: start SGLang with KVDrive, say when it is ready, and leave nothing behind.

The server runs in a session of its own, so a Ctrl-C in the terminal reaches only this process, which stops the server
and everything below it: SIGTERM first, SIGKILL after a grace time. Should this process itself be killed, the kernel
kills the server (PR_SET_PDEATHSIG), and SGLang's own processes die with their parent the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from sglang_kvdrive.cli import processes
from sglang_kvdrive.cli.model import MODEL_NAME
from sglang_kvdrive.errors import KVDriveError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_SECONDS = 20.0
POLL_SECONDS = 0.5
NOTE_SECONDS = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(sys.argv[1:] if argv is None else list(argv))
    if args.die_with_parent:
        processes.die_with_parent(signal.SIGTERM)
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.default_int_handler)
    try:
        command = server_command(args)
    except KVDriveError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"serve: {shlex.join(command)}", flush=True)
    return Supervisor(command, args.host, args.port, args.grace).run()


def _parse(argv: list[str]) -> argparse.Namespace:
    """Everything after `--` goes to SGLang as it is."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="python -m sglang_kvdrive.cli.serve", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder, or a Hugging Face name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--grace", type=float, default=GRACE_SECONDS, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--die-with-parent", action="store_true", help="stop when the process that started this one dies")
    parser.add_argument("--server-module", default="sglang.launch_server", help="the module to run as the server")
    args = parser.parse_args(argv[:split])
    args.server_args = argv[split + 1 :]
    return args


def server_command(args: argparse.Namespace) -> list[str]:
    """The user's flags come last, so they win over ours."""
    model = ["--model-path", args.model]
    if args.model == "smollm2":
        model = ["--model-path", _smollm2_path(), "--served-model-name", MODEL_NAME]
    elif Path(args.model).expanduser().is_dir():
        model = ["--model-path", str(Path(args.model).expanduser().resolve())]
    address = ["--host", args.host, "--port", str(args.port)]
    return [sys.executable, "-m", args.server_module, *model, *address, "--kv-manager", "kvdrive", *args.server_args]


def _smollm2_path() -> str:
    """Convert in another process: PyTorch's threads must not exist in this one when it forks the server."""
    command = [sys.executable, "-m", "sglang_kvdrive.cli.main", "model", "smollm2", "--print-path"]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        raise KVDriveError("the model is not there, the reason is above")
    return result.stdout.strip()


class Supervisor:
    """Owns the server's process tree from start to the last process gone."""

    def __init__(self, command: Sequence[str], host: str, port: int, grace_s: float = GRACE_SECONDS):
        self._command = list(command)
        self._url = f"http://{_reachable(host)}:{port}"
        self._grace_s = grace_s
        self._stop_requests = 0
        self._shared_memory: set[str] = set()

    def run(self) -> int:
        """0 after a requested stop, else the server's own exit code (never 0: it was not asked to leave)."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._request_stop)
        self._begin = time.monotonic()
        us = os.getpid()
        child = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: processes.die_with_parent(signal.SIGKILL, us),  # only between fork and exec; we have no threads
        )
        try:
            self._watch(child)
        finally:
            self._stop(child)
        if self._stop_requests:
            print("serve: stopped, no process is left", flush=True)
            return 0
        print(f"serve: the server stopped by itself with exit code {child.returncode}, its reason is above", file=sys.stderr)
        return child.returncode if child.returncode > 0 else 1

    def _request_stop(self, _signum: int, _frame: object) -> None:
        self._stop_requests += 1

    def _watch(self, child: subprocess.Popen) -> None:
        """Until the server ends or somebody asks us to stop."""
        ready, next_note = False, 0.0
        while child.poll() is None and not self._stop_requests:
            if not ready and _answers(f"{self._url}/health"):
                ready = True
                self._announce()
            if time.monotonic() >= next_note:
                self._note_shared_memory(child)
                next_note = time.monotonic() + NOTE_SECONDS
            time.sleep(POLL_SECONDS)

    def _announce(self) -> None:
        question = {"role": "user", "content": "What is the capital of France?"}
        body = json.dumps({"model": "default", "messages": [question], "max_tokens": 64, "temperature": 0})
        print(
            f"\nready after {time.monotonic() - self._begin:.0f} s. Try it from another terminal:\n\n"
            f"  curl -s {self._url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n\n"
            f"or talk to it: {Path(sys.executable).parent / 'kvdrive'} chat --url {self._url}\nCtrl-C stops it.\n",
            flush=True,
        )

    def _stop(self, child: subprocess.Popen) -> None:
        """SIGTERM to the server, which stops its own processes; SIGKILL to whatever is left after the grace time."""
        tree = processes.descendants(child.pid)
        self._note_shared_memory(child)
        if child.poll() is None:
            print("serve: stopping the server (again: at once)", flush=True)
            child.terminate()
            self._wait_for(child)
        processes.kill_all(child, tree)
        processes.remove_shared_memory(self._shared_memory)

    def _note_shared_memory(self, child: subprocess.Popen) -> None:
        """Again and again, because a server that crashes cannot be asked afterwards."""
        pids = {process.pid for process in processes.descendants(child.pid)} | {child.pid}
        self._shared_memory |= processes.shared_memory_of(pids)

    def _wait_for(self, child: subprocess.Popen) -> None:
        asked, deadline = self._stop_requests, time.monotonic() + self._grace_s
        while child.poll() is None and time.monotonic() < deadline and self._stop_requests == asked:
            time.sleep(0.1)


def _reachable(host: str) -> str:
    """An address to connect to, for one to listen on."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (OSError, urllib.error.URLError, ValueError):
        return False


if __name__ == "__main__":
    sys.exit(main())
