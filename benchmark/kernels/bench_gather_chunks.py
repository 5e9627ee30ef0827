"""GB/s of copying chunks from random places of the home to random slots, beside this machine's copy bandwidth.

python -m benchmark.kernels.bench_gather_chunks [--chunk 2 4] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse

import torch
from kvdrive_kernels.gather_chunks import gather_chunks

from benchmark.common.record import record
from benchmark.common.stored import store
from benchmark.common.timing import copy_gbps, timed

TOKENS = 7500
CHUNKS = (64, 512, 4096)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk", type=int, nargs="+", default=[2, 4], help="tokens per chunk")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--calls", type=int, default=150)
    arguments = parser.parse_args()
    bandwidth = copy_gbps()
    for chunk_size in arguments.chunk:
        stored = store(1, TOKENS, getattr(torch, arguments.dtype), chunk_size)
        source = stored.home.view(-1, 2 * chunk_size * stored.layout.head_dim)
        target = torch.empty_like(source)
        for n in CHUNKS:
            places = [(torch.randperm(len(source))[:n], torch.randperm(len(target))[:n]) for _ in range(arguments.calls + 30)]
            gather_chunks(source, places[0][0], target, places[0][1])
            assert torch.equal(target[places[0][1]], source[places[0][0]])
            result = timed(
                lambda i, p=places, s=source, t=target: gather_chunks(s, p[i][0], t, p[i][1]), calls=arguments.calls, warm=30
            )
            gbps = n * stored.layout.slot_bytes / result["ms"] / 1e6
            record("kernels", op="gather_chunks", shape=f"{n} chunks of {stored.layout.slot_bytes} B", dtype=arguments.dtype,
                   gbps=gbps, bandwidth_gbps=bandwidth, share=gbps / bandwidth, **result)  # fmt: skip
            print(f"gather_chunks {n} of {stored.layout.slot_bytes} B: {1e3 * result['ms']:.0f} us, {gbps:.2f} GB/s, "
                  f"{gbps / bandwidth:.0%} of {bandwidth:.1f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
