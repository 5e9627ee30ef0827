"""The README says what is true."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_measured_tables_are_those_of_the_recorded_results():
    ended = subprocess.run((sys.executable, "-m", "benchmark.readme_tables", "--check"), cwd=ROOT, check=False)
    assert ended.returncode == 0, "run: python -m benchmark.readme_tables"


def test_every_flag_is_in_the_table():
    source = (ROOT / "python/sglang_kvdrive/adapter/args.py").read_text()
    fields = [line.split(":")[0].strip() for line in source.splitlines() if line.startswith(("    kvdrive_", "    kv_manager"))]
    assert len(fields) >= 12
    for field in fields:
        assert f"`--{field.replace('_', '-')}`" in README, field


def test_every_room_of_the_table_exists():
    for line in README.split("## The code")[1].splitlines():
        for name in line.split("`")[1::2]:
            found = [ROOT / name, ROOT / "python/sglang_kvdrive" / name]
            assert any(path.exists() for path in found), name
