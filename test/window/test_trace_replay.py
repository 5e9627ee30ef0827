"""Replay what a real model selected: the hit rates of the two policies are known (`test/fixtures/README.md`)."""

import pytest
import torch
from kvsupport.driver import make_layout
from kvsupport.traces import read_trace
from sglang_kvdrive.values import Selection
from sglang_kvdrive.window.window import Windows

FIRST_COUNTED = 8

GOLDEN = {
    "lru": {1: 68.51, 2: 87.19, 3: 91.88},
    "lookahead": {1: 68.51, 2: 88.45, 3: 92.59},
}

TOLERANCE = {"lru": 0.006, "lookahead": 0.05}
"""Points. LRU is determined by the trace and must match to the last printed digit. For lookahead a step's row holds the
best 192 chunks only. Absent chunks lose against all of them, but how they compare with each other is not recorded: here
the one that was in a row more recently is worth more. (Left as ties they would go by age: 0.1 to 0.4 points lower.)"""


def replay(eviction: str, multiple: int) -> float:
    """Hit rate in percent over a cold start, every chunk its own group."""
    trace = read_trace()
    n_layers, n_heads = trace.ids.shape[:2]
    layout = make_layout(layers=n_layers, kv_heads=n_heads)
    entries = multiple * trace.n_selected
    windows = Windows(layout, n_sequences=1, max_entries=entries, eviction=eviction)
    windows.grow(0, torch.arange(entries * layout.n_pairs, dtype=torch.int32))
    ids = torch.from_numpy(trace.ids)
    worth = torch.arange(1.0, 0.0, -1 / ids.shape[-1])
    scores = torch.zeros(n_layers, n_heads, trace.n_chunks)
    hits = misses = 0
    for at in range(trace.n_steps):
        windows.tick()
        for layer in range(n_layers):
            row = ids[layer, :, at]
            scores[layer] *= 0.5
            scores[layer].scatter_(1, row, worth.expand_as(row) + 1)
            chosen = row[None, :, : trace.n_selected].int()
            lookup = windows.probe(layer, torch.tensor([0]), Selection(chosen, chosen, scores[layer][None]))
            if at >= FIRST_COUNTED:
                hits += int(lookup.n_hits)
                misses += int(lookup.n_misses)
    windows.check_integrity()
    assert hits + misses == n_layers * n_heads * trace.n_selected * (trace.n_steps - FIRST_COUNTED)
    return 100 * hits / (hits + misses)


@pytest.mark.parametrize("multiple", [1, 2, 3])
@pytest.mark.parametrize("eviction", list(GOLDEN))
def test_the_hit_rate_is_the_known_one(eviction, multiple):
    assert replay(eviction, multiple) == pytest.approx(GOLDEN[eviction][multiple], abs=TOLERANCE[eviction])


def test_lookahead_beats_lru_and_lru_beats_fifo():
    rates = [replay(eviction, 2) for eviction in ("lookahead", "lru", "fifo")]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[1] > rates[2]
