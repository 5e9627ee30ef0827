"""The tree is the data path: rooms import downwards, and only the adapter knows SGLang."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_import_contracts_hold():
    found = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT / "kernels")])},
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "0 broken" in found.stdout


def test_the_engine_runs_without_sglang():
    """A process in which SGLang cannot be imported still serves a sequence."""
    program = """
import sys
sys.modules["sglang"] = None
import torch
from sglang_kvdrive.config import KVDriveConfig
from sglang_kvdrive.engine import KVDriveEngine
from sglang_kvdrive.layout import KVLayout
layout = KVLayout(1, 2, 1, 4, torch.float32)
config = KVDriveConfig(dense_below=0, dram_bytes=2 * layout.block_bytes, hbm_bytes=1000 * layout.slot_bytes)
engine = KVDriveEngine(layout, config, n_sequences=1, max_tokens=100)
engine.begin(0)
engine.extend(0, 81)
q, k, v = torch.randn(80, 2, 4), torch.randn(80, 1, 4), torch.randn(80, 1, 4)
engine.prefill(engine.begin_prefill([0], [0], [80]), 0, q, k, v, 0.5)
out = engine.decode(engine.begin_step(torch.tensor([0])), 0, q[:1], k[:1], v[:1], 0.5)
assert out.shape == (1, 2, 4) and engine.stats.seals == 1
print("served")
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert found.stdout.strip() == "served", found.stderr
