"""What `make serve` promises: ready is announced, and nothing stays behind, however it ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def serve(port):
    """Start the supervisor with the stand-in server; yields a function and cleans up."""
    started = []

    def start(*server_args, wrapper=()):
        command = [sys.executable, "-m", "sglang_kvdrive.cli.serve", "--model", "/models/tiny", "--port", str(port)]
        options = ["--server-module", "fake_server", "--grace", "1", "--die-with-parent", "--", *server_args]
        env = {**os.environ, "PYTHONPATH": str(HERE)}
        process = subprocess.Popen(
            [*wrapper, *command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def read_until(process, text):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    pytest.fail(f"{text!r} never came:\n{''.join(lines)}")


def pids_in(output):
    line = next(line for line in output.splitlines() if line.startswith("pids "))
    return [int(pid) for pid in line.split()[1:3]]


def shared_memory(server_pid):
    return Path(f"/dev/shm/sglang_loads_kvdrive_test_{server_pid}.shm")


def wait_gone(pids, timeout=10.0):
    deadline = time.monotonic() + timeout
    while any(map(_alive, pids)):
        assert time.monotonic() < deadline, f"still alive: {[pid for pid in pids if _alive(pid)]}"
        time.sleep(0.05)


def _alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_nothing_is_left(pids, port):
    wait_gone(pids)
    assert not shared_memory(pids[0]).exists()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_leaves_no_process_port_or_shared_memory(serve, port, signum):
    process = serve()
    output = read_until(process, "Ctrl-C stops it")
    assert "--kv-manager kvdrive" in output
    assert f"curl -s http://127.0.0.1:{port}/v1/chat/completions" in output
    pids = pids_in(output)
    assert shared_memory(pids[0]).exists()
    process.send_signal(signum)
    assert "no process is left" in read_until(process, "stopped")
    assert process.wait(10) == 0
    assert_nothing_is_left(pids, port)


def test_a_server_that_ignores_sigterm_is_killed_after_the_grace_time(serve, port):
    process = serve("--stubborn")
    pids = pids_in(read_until(process, "Ctrl-C stops it"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert_nothing_is_left(pids, port)


def test_a_killed_supervisor_takes_the_server_with_it(serve):
    process = serve()
    pids = pids_in(read_until(process, "Ctrl-C stops it"))
    process.kill()
    wait_gone(pids)
    shared_memory(pids[0]).unlink()


def test_a_killed_make_takes_everything_with_it(serve, port):
    starter = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"]
    process = serve(wrapper=starter)
    pids = pids_in(read_until(process, "Ctrl-C stops it"))
    (supervisor,) = psutil.Process(process.pid).children()
    process.kill()
    wait_gone([supervisor.pid])
    assert_nothing_is_left(pids, port)


def test_a_server_that_cannot_start_passes_its_exit_code_on(serve):
    process = serve("--exit-code", "7")
    assert "stopped by itself with exit code 7" in read_until(process, "stopped by itself")
    assert process.wait(10) == 7
