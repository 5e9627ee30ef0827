"""Checks of the machine, shared by `scripts/preflight.py` and `kvdrive doctor`. Each returns one Check.

Runs before anything is installed: standard library only, and readable by Python 3.7.
"""

from __future__ import annotations

import errno
import platform
import shutil
import socket
import sys
from pathlib import Path
from typing import NamedTuple

from sglang_kvdrive.machine import available_memory_bytes, total_memory_bytes

MIN_PYTHON = (3, 11)
MIN_MEMORY_BYTES = 4 << 30
INSTALL_BYTES = 12 * 10**9
MODEL_BYTES = 10**9


class Check(NamedTuple):
    """One line of a report. `fix` says what to do and is shown when `ok` is false."""

    name: str
    ok: bool
    detail: str
    fix: str = ""

    def line(self) -> str:
        text = f"{'ok  ' if self.ok else 'FAIL'}  {self.name}: {self.detail}"
        return text if self.ok else f"{text}\n      fix: {self.fix}"


def check_platform(system: str = "", machine: str = "") -> Check:
    system, machine = system or platform.system(), machine or platform.machine()
    ok = system == "Linux" and machine in ("x86_64", "AMD64")
    fix = "run this on Linux x86-64: another machine, a container (docker run -it python:3.11), or WSL 2 on Windows"
    return Check("platform", ok, f"{system} {machine}" + ("" if ok else ", needed is Linux x86_64"), fix)


def check_python(version: tuple = ()) -> Check:
    version = tuple(version or sys.version_info[:3])
    text, needed = ".".join(map(str, version)), ".".join(map(str, MIN_PYTHON))
    if version < MIN_PYTHON:
        fix = (
            f"install Python {needed} or newer (Debian, Ubuntu: apt install python{needed} python{needed}-venv), "
            f"or name one: PYTHON=/path/to/python{needed}"
        )
        return Check("python", False, f"{text} ({sys.executable}), needed is {needed} or newer", fix)
    try:
        import ensurepip  # noqa: F401, RUF100
        import venv  # noqa: F401, RUF100
    except ImportError as error:
        fix = f"install its venv module (Debian, Ubuntu: apt install python{version[0]}.{version[1]}-venv)"
        return Check("python", False, f"{text} ({sys.executable}) cannot make virtual environments: {error}", fix)
    return Check("python", True, f"{text} ({sys.executable})")


def check_compiler() -> Check:
    path = shutil.which("g++")
    fix = "install it (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++)"
    return Check("compiler", path is not None, path or "g++ is not on PATH", fix)


def check_memory(minimum_bytes: int = MIN_MEMORY_BYTES) -> Check:
    total, available = total_memory_bytes(), available_memory_bytes()
    detail = f"{_gib(available)} available of {_gib(total)}"
    if available >= minimum_bytes:
        return Check("memory", True, detail)
    fix = "stop other programs, or raise the memory limit of the container"
    return Check("memory", False, f"{detail}, needed are {_gib(minimum_bytes)}", fix)


def check_disk(folder: Path, needed_bytes: int, what: str, setting: str) -> Check:
    """`folder` need not exist yet: the file system that will hold it counts."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(str(existing)).free
    detail = f"{free / 1e9:.1f} GB free at {existing} for {what}"
    if free >= needed_bytes:
        return Check("disk", True, detail)
    fix = f"free {(needed_bytes - free) / 1e9:.1f} GB there, or put it elsewhere: {setting}"
    return Check("disk", False, f"{detail}, needed are {needed_bytes / 1e9:.1f} GB", fix)


def check_port(host: str, port: str) -> Check:
    name = f"{host}:{port}"
    if not port.isdigit() or not 1 <= int(port) <= 65535:
        return Check("port", False, f"{port!r} is not a port from 1 to 65535", "choose one: PORT=30000 make serve")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        return Check("port", False, f"{host!r} is not a host name or address ({error})", "HOST=127.0.0.1 or HOST=0.0.0.0")
    except PermissionError:
        return Check("port", False, f"{name} needs root", "choose one from 1024 up: PORT=30000 make serve")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            fix = f"stop what listens there (ss -ltnp 'sport = :{port}'), or choose another: PORT={_another(port)} make serve"
            return Check("port", False, f"{name} is in use", fix)
        return Check("port", False, f"{name} cannot be bound ({error})", "HOST=127.0.0.1 or HOST=0.0.0.0")
    return Check("port", True, f"{name} is free")


def _another(port: str) -> int:
    return int(port) + 1 if int(port) < 65535 else 30000


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB"
