"""Prefill of a prompt in pieces, stock and kvdrive in turns, and what the first sparse step costs on top (the index).

    python -m benchmark.system.bench_prefill [--tokens 2048 7500] [--piece 2048] [--dtype bfloat16] [--repeats 2]

Both must choose the same next token. `seal_s` is the time of the index build, inside the first step after the prompt.
"""

from __future__ import annotations

import argparse
import statistics

from sglang_kvdrive.cli.model import ensure_smollm2

from benchmark.common.interleaved import open_runners
from benchmark.common.kit import text_ids
from benchmark.common.record import record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 7500])
    parser.add_argument("--piece", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    model = ensure_smollm2()
    ids = text_ids(model)
    runners = open_runners(model, ["stock", "kvdrive"], dtype=arguments.dtype, capacity=max(arguments.tokens) + 1024)
    try:
        for tokens in arguments.tokens:
            seconds: dict[str, list[float]] = {name: [] for name in runners}
            next_token, seals = {}, []
            for _ in range(arguments.repeats):
                for name, runner in runners.items():
                    done = runner.call("prefill", ids, tokens, arguments.piece)
                    seconds[name].append(sum(done["s"]))
                    next_token[name] = done["token"]
                    if name == "kvdrive":
                        before = runner.call("counters")["seal_us"]
                        runner.call("decode", 1)
                        seals.append((runner.call("counters")["seal_us"] - before) / 1e6)
            if len(set(next_token.values())) != 1:
                raise SystemExit(f"{tokens} tokens: the next tokens differ: {next_token}")
            for name, runner in runners.items():
                extra = {"seal_s": statistics.median(seals)} if name == "kvdrive" else {}
                record("prefill", manager=name, tokens=tokens, piece=arguments.piece, dtype=arguments.dtype,
                       seconds=statistics.median(seconds[name]), peak_bytes=runner.call("peak_bytes"), **extra)  # fmt: skip
            stock, ours = (statistics.median(seconds[name]) for name in ("stock", "kvdrive"))
            print(f"{tokens:,} tokens in pieces of {arguments.piece}: stock {stock:.1f} s, kvdrive {ours:.1f} s "
                  f"({stock / ours:.2f}x) and {statistics.median(seals):.2f} s for the index", flush=True)  # fmt: skip
    finally:
        for runner in runners.values():
            runner.stop()


if __name__ == "__main__":
    main()
