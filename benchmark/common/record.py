"""One row per measurement, with the circumstances it was made in."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

RESULTS = Path(__file__).resolve().parents[1] / "results"


def record(name: str, **row) -> None:
    """Append a row to `results/<name>.jsonl`."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps({**row, **circumstances()}) + "\n")


def circumstances() -> dict:
    """Date, commit, CPU, threads and what chooses them, versions."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent, check=False
    ).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit,
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "env": {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_", "KVDRIVE_KERNELS"))},
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
