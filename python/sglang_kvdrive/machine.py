"""What this machine, or the container around us, really has.

Runs before anything is installed (`scripts/preflight.py`), so: standard library only, and readable by Python 3.7.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def total_memory_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """RAM this process may ever use: the least of the machine and every cgroup v1 and v2 limit above it."""
    limits = [limit for limit, _ in _cgroup_limits(proc, cgroup)]
    return min([_meminfo(proc)["MemTotal"], *limits])


def available_memory_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """RAM that can be taken now without swapping: the least of the machine and what every cgroup has left."""
    room = [max(0, limit - used) for limit, used in _cgroup_limits(proc, cgroup)]
    return min([_meminfo(proc)["MemAvailable"], *room])


def _meminfo(proc: Path) -> dict[str, int]:
    """Bytes by name. MemAvailable is missing before Linux 3.14; free plus cached is the old estimate of it."""
    fields = {}
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()
        if number and number[0].isdigit():
            fields[name] = int(number[0]) * 1024
    fields.setdefault("MemAvailable", fields.get("MemFree", 0) + fields.get("Cached", 0))
    return fields


def _cgroup_limits(proc: Path, cgroup: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of our memory cgroup and all its parents; page cache that can be dropped is not counted as used."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _walk(cgroup, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroup / "memory"
            yield from _walk(root, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _walk(root: Path, path: str, limit_name: str, usage_name: str, cache_name: str) -> Iterator[tuple[int, int]]:
    """A container often sees its own cgroup as the root while `path` is the host's: missing folders are skipped."""
    folder = root / path.lstrip("/")
    while True:
        limit, used = _read_int(folder / limit_name), _read_int(folder / usage_name)
        if limit is not None:
            yield limit, (used or 0) - _stat_field(folder / "memory.stat", cache_name)
        if folder == root or root not in folder.parents:
            return
        folder = folder.parent


def _read_int(file: Path) -> int | None:
    """None for "max", for v1's "no limit" (close to 2^63) and for a file that is not there."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    if not text.isdigit() or int(text) >= 1 << 60:
        return None
    return int(text)


def _stat_field(file: Path, name: str) -> int:
    try:
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except OSError:
        pass
    return 0
