"""The checks of the machine, and the preflight script that reports them all at once."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_kvdrive import machine
from sglang_kvdrive.cli import checks

ROOT = Path(__file__).resolve().parents[2]
PREFLIGHT = ROOT / "scripts" / "preflight.py"


def test_every_failing_check_says_what_to_do(tmp_path):
    failing = [
        checks.check_platform("Darwin", "arm64"),
        checks.check_python((3, 9, 1)),
        checks.check_memory(minimum_bytes=1 << 60),
        checks.check_disk(tmp_path, 1 << 60, "SGLang", "VENV=/other"),
        checks.check_port("127.0.0.1", "99999"),
        checks.check_port("127.0.0.1", "abc"),
        checks.check_port("no.such.host.invalid", "30000"),
    ]
    assert not any(check.ok for check in failing)
    assert all(check.fix and "fix: " in check.line() for check in failing)


def test_this_machine_passes_the_checks_it_needs_for_the_tests(tmp_path):
    passing = [
        checks.check_platform(),
        checks.check_python(),
        checks.check_memory(1),
        checks.check_disk(tmp_path / "a" / "b", 1, "x", "y"),
    ]
    assert all(check.ok for check in passing), passing
    assert all("fix" not in check.line() for check in passing)


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert checks.check_compiler().ok is False
    assert "apt install g++" in checks.check_compiler().fix


def test_a_port_in_use_is_refused_and_a_free_one_is_not():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        check = checks.check_port("127.0.0.1", port)
        assert not check.ok
        assert f"127.0.0.1:{port} is in use" in check.detail
        assert "PORT=" in check.fix
    assert checks.check_port("127.0.0.1", port).ok


def test_preflight_needs_no_package_and_reports_all_failures_at_once(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-I", "-S", str(PREFLIGHT), "--venv", str(tmp_path / "venv"), "--port", port]
        result = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/nowhere", "HOME": str(tmp_path)})
    assert result.returncode == 1
    assert "FAIL  compiler" in result.stderr
    assert "FAIL  port" in result.stderr
    assert "nothing was installed" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_preflight_counts_disk_only_before_the_installation(tmp_path):
    (tmp_path / "installed").touch()
    command = [sys.executable, "-I", "-S", str(PREFLIGHT), "--venv", str(tmp_path)]
    before = subprocess.run(command, capture_output=True, text=True)
    after = subprocess.run([*command, "--installed", str(tmp_path / "installed")], capture_output=True, text=True)
    assert "SGLang and PyTorch" in before.stdout + before.stderr
    assert "SGLang and PyTorch" not in after.stdout + after.stderr


def _proc(tmp_path, cgroup_line):
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:       16000 kB\nMemFree:  1000 kB\nMemAvailable:   12000 kB\n")
    (proc / "self" / "cgroup").write_text(cgroup_line)
    return proc


def test_memory_is_that_of_the_machine_without_a_cgroup_limit(tmp_path):
    proc = _proc(tmp_path, "0::/\n")
    assert machine.total_memory_bytes(proc, tmp_path / "cgroup") == 16000 * 1024
    assert machine.available_memory_bytes(proc, tmp_path / "cgroup") == 12000 * 1024


def test_the_tightest_cgroup_v2_limit_on_the_way_up_counts(tmp_path):
    proc, cgroup = _proc(tmp_path, "0::/pod/box\n"), tmp_path / "cgroup"
    (cgroup / "pod" / "box").mkdir(parents=True)
    (cgroup / "pod" / "memory.max").write_text("8000000\n")
    (cgroup / "pod" / "memory.current").write_text("3000000\n")
    (cgroup / "pod" / "memory.stat").write_text("anon 1\ninactive_file 500000\n")
    (cgroup / "pod" / "box" / "memory.max").write_text("max\n")
    assert machine.total_memory_bytes(proc, cgroup) == 8000000
    assert machine.available_memory_bytes(proc, cgroup) == 8000000 - (3000000 - 500000)


def test_a_cgroup_v1_limit_counts_also_when_the_path_is_that_of_the_host(tmp_path):
    proc, cgroup = _proc(tmp_path, "5:cpu:/x\n4:memory:/docker/abc\n"), tmp_path / "cgroup"
    (cgroup / "memory").mkdir(parents=True)
    (cgroup / "memory" / "memory.limit_in_bytes").write_text("4000000\n")
    (cgroup / "memory" / "memory.usage_in_bytes").write_text("5000000\n")
    assert machine.total_memory_bytes(proc, cgroup) == 4000000
    assert machine.available_memory_bytes(proc, cgroup) == 0


def test_the_cgroup_v1_spelling_of_no_limit_is_no_limit(tmp_path):
    proc, cgroup = _proc(tmp_path, "4:memory:/\n"), tmp_path / "cgroup"
    (cgroup / "memory").mkdir(parents=True)
    (cgroup / "memory" / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    assert machine.total_memory_bytes(proc, cgroup) == 16000 * 1024


@pytest.mark.parametrize("name", ["serve", "serve-tiers", "test"])
def test_make_checks_the_machine_before_it_installs(name):
    plan = subprocess.run(
        ["make", "-n", name, "VENV=/nowhere/venv", "PYTHON=python3"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert plan.index("scripts/preflight.py") < plan.index("-m venv") < plan.index("pip install")
