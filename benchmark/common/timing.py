"""Times of one call, and the memory bandwidth that they are measured against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache

import torch

STREAM_BYTES = 512 << 20
"""Read or copied to measure the bandwidth: many times any cache."""


def timed(call: Callable[[int], object], *, calls: int, warm: int = 30) -> dict[str, float]:
    """Milliseconds of `call(i)` for i = 0, 1, ...: median `ms`, `p20`, `p80`. The number lets a call rotate over its data."""
    found = []
    for i in range(warm + calls):
        started = time.perf_counter()
        call(i)
        found.append(1e3 * (time.perf_counter() - started))
    return spread(found[warm:])


def spread(ms: list[float]) -> dict[str, float]:
    """Median `ms`, 20th and 80th percentile."""
    quantiles = statistics.quantiles(ms, n=10)
    return {"ms": statistics.median(ms), "p20": quantiles[1], "p80": quantiles[7]}


@cache
def read_gbps() -> float:
    """GB/s that all threads together read from memory (the best of several sums over a large array)."""
    data = torch.ones(STREAM_BYTES // 4)
    return max(STREAM_BYTES / _seconds(data.sum) / 1e9 for _ in range(8))


@cache
def copy_gbps() -> float:
    """GB/s of bytes copied, counted once."""
    source, target = (torch.ones(STREAM_BYTES // 8) for _ in range(2))
    return max(STREAM_BYTES / 2 / _seconds(lambda: target.copy_(source)) / 1e9 for _ in range(8))


def _seconds(call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
