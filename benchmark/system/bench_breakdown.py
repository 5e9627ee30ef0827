"""Where the time of a decode step goes: every stage of ours, SGLang's layers and its bookkeeping.

    python -m benchmark.system.bench_breakdown [--tokens 128 2048 8192 32000] [--batches 1 4 8] [--dtype bfloat16]

The timers cost a few per cent of a step; `step_ms` is measured without them.
"""

from __future__ import annotations

import argparse
import statistics

from sglang_kvdrive.cli.model import ensure_smollm2

from benchmark.common.interleaved import open_runners
from benchmark.common.kit import ensure_kit
from benchmark.common.record import record

MOST_TOKENS = 70000
"""Stored by one batch; larger combinations are left out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 2048, 8192, 32000])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--runners", nargs="+", default=["kvdrive", "stock"])
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    model = ensure_smollm2()
    kit = ensure_kit(model)
    shapes = [(n, t) for n in arguments.batches for t in arguments.tokens if n * t <= MOST_TOKENS]
    capacity = max(n * (t + 1024) for n, t in shapes)
    for name in arguments.runners:
        with open_runners(model, [name], dtype=arguments.dtype, capacity=capacity)[name] as runner:
            for n, tokens in shapes:
                runner.call("start", str(kit), [tokens] * n, 2 * arguments.steps + 4)
                runner.call("decode", 3)
                plain = statistics.median(runner.call("decode", arguments.steps)["ms"])
                stages = runner.call("decode", arguments.steps, stages=True)["stages"]
                record("breakdown", manager=name, batch=n, tokens=tokens, dtype=arguments.dtype, step_ms=plain, stages=stages)
                parts = sorted(stages.items(), key=lambda item: -item[1])
                print(
                    f"{name} {n} x {tokens:,}: {plain:.1f} ms; " + ", ".join(f"{k} {v:.1f}" for k, v in parts if v >= 0.1),
                    flush=True,
                )


if __name__ == "__main__":
    main()
