"""Where the kernels come from: compiled once, refused with a reason, replaced by the twins with one warning."""

import logging
import os
import subprocess
import sys

import pytest
from kvdrive_kernels import native


@pytest.fixture
def kernels():
    """These tests choose for themselves."""


def run(program: str, **env) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **{k: str(v) for k, v in env.items()}}
    )


LOOK = """
import logging, torch
logging.basicConfig(format="%(levelname)s %(message)s")
from kvdrive_kernels import native
from kvdrive_kernels.store_tokens import store_tokens
pool = torch.zeros(4, 2, 2, 16)
store_tokens(pool, torch.tensor([[1]]), 0, torch.tensor([0]), torch.ones(1, 1, 16), torch.ones(1, 1, 16))
store_tokens(pool, torch.tensor([[2]]), 0, torch.tensor([0]), torch.ones(1, 1, 16), torch.ones(1, 1, 16))
print(native.library() is not None, int(pool.sum()))
"""


def test_without_a_compiler_the_twins_serve_after_one_warning(tmp_path):
    found = run(LOOK, CXX="/nowhere/g++", KVDRIVE_CACHE=tmp_path, KVDRIVE_KERNELS="auto")
    assert found.stdout.split() == ["False", "64"], found.stderr
    assert found.stderr.count("WARNING") == 1
    assert "install g++" in found.stderr


def test_native_kernels_that_cannot_be_built_are_an_error_where_they_were_asked_for(tmp_path):
    found = run(LOOK, CXX="/nowhere/g++", KVDRIVE_CACHE=tmp_path, KVDRIVE_KERNELS="native")
    assert found.returncode != 0
    assert "no C++ compiler" in found.stderr


def test_an_unknown_choice_names_the_allowed_ones():
    found = run(LOOK, KVDRIVE_KERNELS="sse9")
    assert found.returncode != 0
    assert "'sse9'" in found.stderr
    assert "avx2" in found.stderr


def test_a_level_that_the_cpu_lacks_is_refused_with_what_is_missing(monkeypatch):
    monkeypatch.setattr(native, "cpu_flags", lambda: frozenset({"avx2", "fma", "f16c", "bmi2"}))
    assert native.best_level() == "avx2"
    with pytest.raises(native.BuildError, match="lacks avx512_bf16"):
        native.build("avx512bf16")
    with pytest.raises(native.BuildError, match="lacks avx512bw"):
        native.build("avx512")
    monkeypatch.setattr(native, "cpu_flags", frozenset)
    assert native.best_level() == "generic"


def test_a_built_library_is_used_again_and_another_source_is_another_library(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    level = native.best_level()
    first = native.build(level)
    caplog.clear()
    assert native.build(level) == first
    assert not caplog.records
    monkeypatch.setattr(native, "_compiler_version", lambda _compiler: "another compiler")
    monkeypatch.setattr(native, "_compile", lambda _command, target: target.touch())
    other = native.build(level)
    assert other != first
    other.unlink()


@pytest.mark.parametrize("level", ["avx512bf16", "avx512"])
def test_the_widest_kernels_compile_on_any_machine(level):
    """Only compiled: this CPU may not be able to run them (their code runs in the other tests, as pairs of narrow vectors)."""
    from tvm_ffi.libinfo import include_paths

    command = ["g++", *native.FLAGS, *native.LEVELS[level][1], *(f"-I{p}" for p in include_paths()), "-fsyntax-only"]
    done = subprocess.run([*command, str(native.SOURCES / "cpp" / "library.cpp")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
