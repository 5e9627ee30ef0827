"""A tree of processes: what belongs to it, how all of it ends, and which shared memory it would leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
SHARED_MEMORY = "/dev/shm/"
SGLANG_NAMES = ("sglang_loads_", "sgl_shm", "multi_tokenizer_args_")
"""What SGLang's own names there begin with (its `stale_shm_cleanup.py`). Nothing else may be removed: a user's model can
lie in /dev/shm too, and is mapped by the server."""


def die_with_parent(signum: int, parent: int | None = None) -> None:
    """Ask the kernel for `signum` when our parent dies. If `parent` has died already nobody would send it, so go now."""
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def descendants(pid: int) -> set[psutil.Process]:
    """Everything below `pid`. To be taken before `pid` ends: orphans can no longer be found through it."""
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def kill_all(child: subprocess.Popen, tree: set[psutil.Process]) -> None:
    """SIGKILL, but Python's resource trackers last: they unlink the semaphores of the others once those are dead."""
    child.kill()
    child.wait()
    for process in tree:
        if not _is_tracker(process):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    psutil.wait_procs(list(tree), timeout=3)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    psutil.wait_procs(list(tree), timeout=3)


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("resource_tracker" in part for part in process.cmdline())
    return False


def shared_memory_of(pids: set[int]) -> set[str]:
    """Files of SGLang in /dev/shm that these processes have mapped.

    SGLang ends its scheduler with SIGKILL, so the scheduler's load snapshot stays in /dev/shm even after an orderly stop.
    """
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, _, name = line.partition(SHARED_MEMORY)
                if name.startswith(SGLANG_NAMES) and "/" not in name and not name.endswith(" (deleted)"):
                    found.add(SHARED_MEMORY + name)
    return found


def remove_shared_memory(paths: set[str]) -> None:
    """Unlink what is still there of `paths`, which only dead processes have used."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
