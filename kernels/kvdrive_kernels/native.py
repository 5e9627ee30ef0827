"""The C++ kernels: compiled once per machine and version into the user's cache (`KVDRIVE_CACHE`), loaded by who needs them.

`KVDRIVE_KERNELS` (or `choose`) says which: `auto` (the best that this CPU runs, the PyTorch twins where nothing compiles),
`native` (as auto, but an error where nothing compiles), `avx512bf16`, `avx512`, `avx2`, `generic` (that instruction set), `torch`
(the twins).
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from filelock import FileLock

logger = logging.getLogger("kvdrive_kernels")

SOURCES = Path(__file__).parent
CHOICES = ("auto", "native", "avx512bf16", "avx512", "avx2", "generic", "torch")
FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-Wno-psabi")
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c", "bmi2")
LEVELS = {
    "avx512bf16": ((*AVX512, "avx512_bf16"), ("-march=x86-64-v4", "-mavx512bf16")),
    "avx512": (AVX512, ("-march=x86-64-v4",)),
    "avx2": (("avx2", "fma", "f16c", "bmi2"), ("-march=x86-64-v3",)),
    "generic": ((), ("-march=x86-64",)),
}
"""What a level needs of the CPU, and what it tells the compiler. Best first."""

_chosen: str | None = None


class BuildError(RuntimeError):
    """The kernels could not be compiled; the message says why and what to do."""


def choose(kernels: str) -> None:
    """Say which kernels this process uses; for whoever is not served by `KVDRIVE_KERNELS`."""
    global _chosen
    if kernels not in CHOICES:
        raise ValueError(f"kernels {kernels!r} is not one of {', '.join(CHOICES)}")
    _chosen = kernels
    library.cache_clear()


def chosen() -> str:
    return _chosen or os.environ.get("KVDRIVE_KERNELS", "auto")


@cache
def library():
    """The loaded kernels, or None where the PyTorch twins run.

    Raises:
        BuildError: a level was asked for that cannot be built or run here.
    """
    wanted = chosen()
    if wanted not in CHOICES:
        raise BuildError(f"KVDRIVE_KERNELS is {wanted!r}, it must be one of {', '.join(CHOICES)}")
    if wanted == "torch":
        return None
    try:
        path = build(_level(wanted))
    except BuildError as error:
        if wanted != "auto":
            raise
        logger.warning("kvdrive: the CPU kernels run in PyTorch, several times slower: %s", error)
        return None
    from tvm_ffi import load_module

    return load_module(str(path))


def in_use() -> str:
    """The instruction set of the loaded kernels, or `torch`."""
    return "torch" if library() is None else _level(chosen())


def _level(wanted: str) -> str:
    return best_level() if wanted in ("auto", "native") else wanted


def cpu_flags() -> frozenset[str]:
    """What this CPU can do, as Linux names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def best_level() -> str:
    have = cpu_flags()
    return next(level for level, (needs, _) in LEVELS.items() if have.issuperset(needs))


def build(level: str, extra_flags: tuple[str, ...] = ()) -> Path:
    """Path of the library for a level; compiled by g++ if it is not in the cache. Processes that ask at once wait for one.

    Raises:
        BuildError: the CPU lacks the level, there is no compiler, or it fails.
    """
    if level not in LEVELS:
        raise BuildError(f"{level!r} is not one of {', '.join(LEVELS)}")
    needs, flags = LEVELS[level]
    if missing := set(needs) - cpu_flags():
        raise BuildError(f"this CPU lacks {', '.join(sorted(missing))}, which the {level} kernels need")
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, *FLAGS, *flags, *extra_flags]
    folder = cache_dir() / "kernels"
    target = folder / f"{level}-{_fingerprint(command)}.so"
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not target.is_file():
                _compile(command, target)
    except OSError as error:
        raise BuildError(f"the kernels cannot be written to {folder}: {error}") from error
    return target


def cache_dir() -> Path:
    """`KVDRIVE_CACHE`, else `sglang-kvdrive` in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-kvdrive"
    return Path(os.environ.get("KVDRIVE_CACHE") or default)


def _fingerprint(command: list[str]) -> str:
    """Of everything that makes the library what it is: sources, flags, compiler and the interface it is built against."""
    from importlib.metadata import version

    digest = hashlib.sha256("\0".join([*command, _compiler_version(command[0]), version("apache-tvm-ffi")]).encode())
    for path in sorted([*SOURCES.rglob("*.h"), *SOURCES.rglob("*.cpp")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _compiler_version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"no C++ compiler: {compiler!r} does not run ({error}); install g++, or set CXX") from error


def _compile(command: list[str], target: Path) -> None:
    from tvm_ffi.libinfo import find_libtvm_ffi, include_paths

    logger.info("kvdrive: compiling the CPU kernels (once, about half a minute): %s", target)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        includes = [f"-I{path}" for path in include_paths()]
        done = subprocess.run(
            [*command, *includes, str(SOURCES / "cpp" / "library.cpp"), "-o", str(made), find_libtvm_ffi()],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise BuildError(f"{command[0]} failed with {done.returncode}: {done.stderr.strip()[-2000:]}")
        made.replace(target)
