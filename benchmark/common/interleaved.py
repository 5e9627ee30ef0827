"""Runners that take turns: the same batch, one after the other, several times, so that a slow minute hits all of them."""

from __future__ import annotations

from pathlib import Path

from benchmark.common.runner import KVDRIVE, STOCK, Runner
from benchmark.common.timing import spread

WHOLE = ("--kvdrive-dense-below", str(1 << 30))
"""Attends everything through the same kernels: what is gained beyond it is sparsity's."""


def open_runners(model: Path, names: list[str], *, dtype: str, capacity: int) -> dict[str, Runner]:
    """Runners by name: `stock`, `kvdrive` (defaults), `dense` (kvdrive attending everything).

    Args:
        capacity: tokens that each must hold.
    """
    flags = {"stock": STOCK, "kvdrive": KVDRIVE, "dense": (*KVDRIVE, *WHOLE)}
    return {name: Runner(model, flags[name], dtype=dtype, capacity=capacity) for name in names}


def decode_in_turns(runners: dict[str, Runner], kit: Path, lengths: list[int], *, rounds: int, steps: int) -> dict[str, dict]:
    """Median step time of each runner on the same batch, fed with the same tokens.

    Returns:
        by name: `ms` median, `p20`, `p80`, and `argmax` and `margin` `[steps][B]` of the first round.
    """
    times: dict[str, list[float]] = {name: [] for name in runners}
    first = {}
    for runner in runners.values():
        runner.call("start", str(kit), lengths, rounds * steps + 4)
        runner.call("decode", 3)  # indexes are built, memory is touched
    for _ in range(rounds):
        for name, runner in runners.items():
            done = runner.call("decode", steps)
            times[name] += done["ms"]
            first.setdefault(name, {"argmax": done["argmax"], "margin": done["margin"]})
    for runner in runners.values():
        runner.call("drop")
    return {name: {**spread(found), **first[name]} for name, found in times.items()}


def agreement(reference: dict, other: dict, sure: float) -> float:
    """Share of the tokens chosen alike, of those that the reference prefers by more than `sure`: the rest is rounding."""
    chosen = [
        a == b
        for row, margins, found in zip(reference["argmax"], reference["margin"], other["argmax"], strict=True)
        for a, margin, b in zip(row, margins, found, strict=True)
        if margin > sure
    ]
    return sum(chosen) / max(len(chosen), 1)
