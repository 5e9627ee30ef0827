"""From which length on is sparse attention faster than attending everything, on this device? Measured once, at start.

One layer with random K and V, one sequence: the best of a few steps of each kind at growing lengths. The answer depends on
the device, the model's heads and the budget, never on the load.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from sglang_kvdrive.config import KVDriveConfig
from sglang_kvdrive.engine import KVDriveEngine
from sglang_kvdrive.layout import BLOCK_TOKENS, KVLayout

LENGTHS = (1024, 2048, 4096, 8192, 16384)
REPEATS = 5


def break_even_tokens(layout: KVLayout, config: KVDriveConfig, context_len: int) -> int:
    """The longest tested length at which exact attention is not slower than sparse attention; 0 if it always is.

    Args:
        layout: geometry of the model; only one layer of it is measured.
        config: budget and index settings.
        context_len: lengths beyond it are not tested.
    """
    one_layer = replace(layout, n_layers=1)
    exact = 0
    for n_tokens in (n for n in LENGTHS if n < context_len):
        dense, sparse = (_step_seconds(one_layer, config, n_tokens, dense_below=limit) for limit in (2 * n_tokens, 0))
        if dense > sparse:
            break
        exact = n_tokens
    return exact


def _step_seconds(layout: KVLayout, config: KVDriveConfig, n_tokens: int, *, dense_below: int) -> float:
    """Least time of one decode step of one layer."""
    longest = n_tokens + REPEATS + 1
    places = max(config.slots_of(layout, longest).total, config.dense_slots(layout, longest))
    sizes = {
        "hbm_bytes": places * layout.slot_bytes,
        "dram_bytes": (longest // BLOCK_TOKENS + 1) * layout.block_bytes,
        "dense_below": min(dense_below, longest),
    }
    engine = KVDriveEngine(layout, config.resolve(**sizes), n_sequences=1, max_tokens=longest)
    generator = torch.Generator().manual_seed(n_tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(layout.dtype)

    engine.begin(0)
    engine.extend(0, n_tokens)
    plan = engine.begin_prefill([0], [0], [n_tokens])
    keys, values = (random(n_tokens, layout.n_kv_heads, layout.head_dim) for _ in range(2))
    engine.transfer.write_home(0, plan.rows, plan.inside, keys, values)
    best = float("inf")
    for _ in range(REPEATS):
        engine.extend(0, int(engine.book.n_tokens[0]) + 1)
        q, k, v = (random(1, heads, layout.head_dim) for heads in (layout.n_q_heads, layout.n_kv_heads, layout.n_kv_heads))
        step = engine.begin_step(torch.tensor([0]))
        started = time.perf_counter()
        engine.decode(step, 0, q, k, v, layout.head_dim**-0.5)
        best = min(best, time.perf_counter() - started)
    return best
