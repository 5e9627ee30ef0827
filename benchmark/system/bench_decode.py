"""Decode steps of stock SGLang, of kvdrive, and of kvdrive attending everything, on the same stored text, in turns.

    python -m benchmark.system.bench_decode [--batches 1x256 1x7500 4x4096] [--dtype bfloat16] [--rounds 5]

No server: SGLang's model runner in one process each (`common/runner.py`). The tokens that are fed come from the text, so all do
the same work; that attending everything chooses the tokens that stock chooses is checked before a time is believed.
"""

from __future__ import annotations

import argparse

from sglang_kvdrive.cli.model import ensure_smollm2

from benchmark.common.interleaved import agreement, decode_in_turns, open_runners
from benchmark.common.kit import ensure_kit
from benchmark.common.record import record

BATCHES = ["1x128", "1x256", "1x512", "8x512", "1x2048", "1x4096", "1x7500", "4x4096", "8x8000", "1x16384", "1x32000"]
SURE = 0.5
"""Logits between the best token and the next: what is closer can change places in bf16, whose logits are 1/8 apart."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", default=BATCHES, help="requests x stored tokens")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6, help="of each runner per round")
    parser.add_argument("--runners", nargs="+", default=["stock", "dense", "kvdrive"])
    arguments = parser.parse_args()
    model = ensure_smollm2()
    kit = ensure_kit(model)
    batches = [tuple(int(n) for n in batch.split("x")) for batch in arguments.batches]
    capacity = max(n * (tokens + 1024) for n, tokens in batches)
    runners = open_runners(model, arguments.runners, dtype=arguments.dtype, capacity=capacity)
    try:
        for n, tokens in batches:
            found = decode_in_turns(runners, kit, [tokens] * n, rounds=arguments.rounds, steps=arguments.steps)
            equal = None
            if "stock" in found and "dense" in found:
                equal = agreement(found["stock"], found["dense"], SURE)
                if equal < 1:
                    raise SystemExit(
                        f"{n} x {tokens}: attending everything agrees with stock on {equal:.0%} of the clear tokens only"
                    )
            for name, result in found.items():
                times = {f"{key}_ms" if key != "ms" else "step_ms": result[key] for key in ("ms", "p20", "p80")}
                record("decode", manager=name, batch=n, tokens=tokens, dtype=arguments.dtype, agrees=equal, **times)
            line = ", ".join(f"{name} {result['ms']:.1f} ms" for name, result in found.items())
            print(f"{n} x {tokens:,}: {line}", flush=True)
    finally:
        for runner in runners.values():
            runner.stop()


if __name__ == "__main__":
    main()
