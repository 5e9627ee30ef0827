"""Time of one decode step through the server, beside stock SGLang (`torch_native`), in one interleaved run.

    python -m benchmark.system.bench_step [--tokens 128 2048 4096 7500] [--repeats 3] [--dtype float32] [--flags=...]

The gap between streamed tokens of one request. The server that is not being asked is stopped (SIGSTOP), because an idle
scheduler burns a core. Bytes are counted by the engine, not inferred.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmark.common.record import record

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))
from kvsupport.server import STOCK, Server
from kvsupport.texts import story
from sglang_kvdrive.cli.model import ensure_smollm2

NEW_TOKENS = 32
SKIPPED = 4
"""First gaps are not counted: the index is built and the windows fill."""


def pause(server: Server, signal_number: int) -> None:
    for process in server.tree():
        process.send_signal(signal_number)


def step_ms(server: Server, ids: list[int]) -> tuple[float, float]:
    """(median gap between tokens, time to the first token) in milliseconds."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}}
    started = time.perf_counter()
    times = [time.perf_counter() for _ in server.stream("/generate", body)]
    gaps = [1e3 * (b - a) for a, b in zip(times[SKIPPED:], times[SKIPPED + 1 :], strict=False)]
    return statistics.median(gaps), 1e3 * (times[0] - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 2048, 4096, 7500])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--flags", default="", help="further flags of the kvdrive server, in one string")
    arguments = parser.parse_args()
    model, folder = ensure_smollm2(), Path(tempfile.mkdtemp())
    common = ("--dtype", arguments.dtype, "--chunked-prefill-size", "2048")
    with (
        Server(model, (*STOCK, *common), log=folder / "stock.log", kvdrive=False, checked=False) as stock,
        Server(model, (*common, *arguments.flags.split()), log=folder / "kvdrive.log", checked=False) as ours,
    ):
        servers = {"stock": stock, "kvdrive": ours}
        for server in servers.values():
            pause(server, signal.SIGSTOP)
        for n_tokens in arguments.tokens:
            measured: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
            for repeat in range(arguments.repeats):
                for name, server in servers.items():
                    pause(server, signal.SIGCONT)
                    before = server.state() if name == "kvdrive" else None
                    measured[name].append(step_ms(server, story(n_tokens, seed=repeat)))
                    counted = server.counted(before) if before else None
                    pause(server, signal.SIGSTOP)
                    if counted:
                        bytes_per_step = {k: counted[k] // counted["decode_steps"] for k in ("bytes_fetched", "bytes_appended")}
                        attended = counted["attended_entries"] / counted["stored_entries"]
            step = {name: statistics.median(m[0] for m in found) for name, found in measured.items()}
            first = {name: statistics.median(m[1] for m in found) for name, found in measured.items()}
            for name in servers:
                extra = {**bytes_per_step, "attended_share": attended} if name == "kvdrive" else {}
                record(
                    "step",
                    manager=name,
                    tokens=n_tokens,
                    step_ms=step[name],
                    first_token_ms=first[name],
                    flags=arguments.flags,
                    dtype=arguments.dtype,
                    **extra,
                )
            ratio = step["stock"] / step["kvdrive"]
            print(f"{n_tokens:5} tokens: stock {step['stock']:.0f} ms, kvdrive {step['kvdrive']:.0f} ms per step ({ratio:.2f}x); "
                  f"first token {first['stock']:.0f} and {first['kvdrive']:.0f} ms", flush=True)  # fmt: skip
        for server in servers.values():
            pause(server, signal.SIGCONT)


if __name__ == "__main__":
    main()
