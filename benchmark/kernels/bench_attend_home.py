"""GB/s of decode attention where chunks lie, everything and the default budget, beside this machine's memory bandwidth.

    python -m benchmark.kernels.bench_attend_home [--shapes 1x7500 1x32000 8x8000] [--dtype bfloat16]

Every call reads another layer, so that no cache flatters it. The result is compared with the PyTorch twin first.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from kvdrive_kernels.attend_home import attend_home, reference

from benchmark.common.record import record
from benchmark.common.stored import Stored, store
from benchmark.common.timing import read_gbps, timed

SINK_CHUNKS, ZONE_TOKENS, BUDGET_TOKENS = 2, 192, 512


def arguments_of(stored: Stored, selects: bool) -> tuple:
    """What follows q, home and layer: everything as sink, or sink, a random selection and a zone."""
    n, chunk = stored.n_batch, stored.layout.chunk_size
    tokens = torch.full((n,), stored.n_tokens)
    everything = (tokens + chunk - 1) // chunk
    if not selects:
        nothing = torch.empty(n, stored.layout.n_kv_heads, 0, dtype=torch.int32)
        return stored.blocks, torch.arange(n), tokens, everything, everything, nothing, torch.zeros(n, dtype=torch.int64)
    zone = everything - ZONE_TOKENS // chunk
    wanted = BUDGET_TOKENS // chunk
    ids = torch.stack([torch.randperm(int(zone[0]) - SINK_CHUNKS)[:wanted] for _ in range(n * stored.layout.n_kv_heads)])
    ids = (ids + SINK_CHUNKS).int().view(n, -1, wanted)
    return stored.blocks, torch.arange(n), tokens, torch.full((n,), SINK_CHUNKS), zone, ids, torch.full((n,), wanted)


def attend_layer(stored: Stored, q: torch.Tensor, places: tuple, i: int) -> torch.Tensor:
    """The i-th call: layer after layer."""
    return attend_home(q, stored.home, i % stored.layout.n_layers, *places, stored.layout.head_dim**-0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1x7500", "1x32000", "8x8000"], help="sequences x tokens")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--calls", type=int, default=150)
    arguments = parser.parse_args()
    bandwidth = read_gbps()
    for n_batch, n_tokens in (tuple(int(n) for n in shape.split("x")) for shape in arguments.shapes):
        stored = store(n_batch, n_tokens, getattr(torch, arguments.dtype))
        q, scale = stored.queries(), stored.layout.head_dim**-0.5
        for selects in (False, True):
            places = arguments_of(stored, selects)
            torch.testing.assert_close(
                attend_layer(stored, q, places, 0), reference(q, stored.home, 0, *places, scale), rtol=2e-2, atol=2e-3
            )
            call = partial(attend_layer, stored, q, places)
            result = timed(call, calls=arguments.calls)
            share = (2 * SINK_CHUNKS + ZONE_TOKENS + BUDGET_TOKENS) / n_tokens if selects else 1.0
            gbps = stored.layer_bytes * share / result["ms"] / 1e6
            what = f"{share:.1%}" if selects else "everything"
            record("kernels", op="attend_home", shape=f"{n_batch}x{n_tokens}", dtype=arguments.dtype, attended=what, gbps=gbps,
                   bandwidth_gbps=bandwidth, share=gbps / bandwidth, **result)  # fmt: skip
            print(f"attend_home {n_batch} x {n_tokens:,} {arguments.dtype}, {what}: {1e3 * result['ms']:.0f} us, "
                  f"{gbps:.1f} GB/s, {gbps / bandwidth:.0%} of {bandwidth:.1f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
