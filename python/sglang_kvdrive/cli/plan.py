"""`kvdrive plan fit`: does a model, context and batch fit into given tiers? Answered before anyone starts a server."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from sglang_kvdrive.errors import ConfigError

FITS, DOES_NOT_FIT = 0, 1


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("plan", help="capacity planning", description="Capacity planning.")
    plans = parser.add_subparsers(dest="plan", required=True, metavar="plan")
    fit = plans.add_parser("fit", help="does it fit?", description=__doc__)
    fit.add_argument("--model", required=True, help="folder, config.json, cached Hugging Face name, or smollm2")
    fit.add_argument("--context", required=True, type=int, help="tokens of one request, prompt and generation together")
    fit.add_argument("--batch", required=True, type=int, help="requests at the same time")
    for tier in ("hbm", "dram", "ssd"):
        fit.add_argument(
            f"--{tier}", default="auto", metavar="SIZE", help=f"{tier.upper()} for KV, such as 512MiB; auto: no limit"
        )
    fit.add_argument("--preset", help="as --kvdrive-preset")
    fit.add_argument("--budget", help="as --kvdrive-budget: 6.25%% or 2048tok")
    fit.add_argument("--budget-floor", type=int, help="as --kvdrive-budget-floor")
    fit.add_argument("--chunk-size", type=int, help="as --kvdrive-chunk-size")
    fit.add_argument("--window", type=float, default=2.0, help="as --kvdrive-window")
    fit.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="KV dtype (default: the model's)")
    fit.set_defaults(run=run)


@dataclass(frozen=True)
class TierNeed:
    """One tier's part of a plan. `limit_bytes` is None where the user set none."""

    name: str
    request_bytes: int
    limit_bytes: int | None
    parts: str

    @property
    def largest_batch(self) -> int | None:
        return None if self.limit_bytes is None else self.limit_bytes // self.request_bytes


def run(args: argparse.Namespace) -> int:
    from sglang_kvdrive.cli.modelinfo import read_model_info

    _check_counts(args)
    info = read_model_info(args.model)
    config, layout = _config_and_layout(args, info)
    needs = tier_needs(config, layout, args.context)

    _print_question(args, info, config, layout)
    for need in needs:
        _print_need(need, args.batch)
    if args.ssd != "auto":
        print("SSD   not built yet, counted as 0: everything has to fit into DRAM")
    return _verdict(needs, args.batch)


def _print_question(args: argparse.Namespace, info, config, layout) -> None:
    """What was understood, so that a figure can be pasted somewhere and still be read."""
    dtype = str(layout.dtype).removeprefix("torch.")
    heads = f"{info.n_q_heads} query and {info.n_kv_heads} KV heads, head dim {info.head_dim}"
    print(f"{args.model}: {info.n_layers} layers, {heads}, {dtype} KV")
    settings = f"budget {config.budget}, chunk size {config.chunk_size}, window x{config.window_multiple:g}"
    print(f"context {args.context:,} tokens, batch {args.batch}, {settings}")
    if args.context > info.native_context:
        print(f"beyond the model's native context of {info.native_context:,}: see `kvdrive doctor --model {args.model}`")
    print(f"a decode step attends at most {config.attended_at_most(args.context):,} of {args.context:,} tokens per KV head\n")


def _check_counts(args: argparse.Namespace) -> None:
    counts = {"--context": args.context, "--batch": args.batch}
    reasons = [f"{name} is {count}, it must be at least 1" for name, count in counts.items() if count < 1]
    if reasons:
        raise ConfigError(reasons)


def _config_and_layout(args: argparse.Namespace, info):
    import torch

    from sglang_kvdrive.config import DEFAULT_PRESET, config_from_flags, parse_size
    from sglang_kvdrive.layout import KVLayout

    config = config_from_flags(
        preset=args.preset or DEFAULT_PRESET, budget=args.budget, budget_floor=args.budget_floor,
        chunk_size=args.chunk_size, window=args.window, hbm=args.hbm, dram=args.dram,
    )  # fmt: skip
    parse_size(args.ssd, what="--ssd")
    dtype = getattr(torch, args.dtype or info.dtype, None)
    layout = KVLayout(info.n_layers, info.n_q_heads, info.n_kv_heads, info.head_dim, dtype, config.chunk_size)
    return config, layout


def tier_needs(config, layout, n_tokens: int) -> tuple[TierNeed, TierNeed]:
    """Bytes of one request of `n_tokens` in HBM and in DRAM."""
    from sglang_kvdrive.layout import BLOCK_TOKENS, ceil_div

    slots = config.slots_of(layout, n_tokens)
    n_blocks = ceil_div(n_tokens, BLOCK_TOKENS)
    hbm_parts = (f"{slots.total:,} slots of {layout.slot_bytes:,} bytes: sink {slots.sink:,}, local and pending {slots.zone:,}, "
                 f"window {slots.window:,}, index {slots.index:,}")  # fmt: skip
    dram_parts = f"{n_blocks:,} blocks of {BLOCK_TOKENS} tokens, {layout.block_bytes:,} bytes each"
    return (
        TierNeed("HBM", slots.total * layout.slot_bytes, config.hbm_bytes, hbm_parts),
        TierNeed("DRAM", n_blocks * layout.block_bytes, config.dram_bytes, dram_parts),
    )


def _print_need(need: TierNeed, batch: int) -> None:
    from sglang_kvdrive.config import format_bytes

    print(f"{need.name:<5} {format_bytes(need.request_bytes)} per request: {need.parts}")
    total = f"      {format_bytes(need.request_bytes * batch)} for batch {batch}"
    if need.limit_bytes is None:
        print(f"{total}; no limit given (--{need.name.lower()} SIZE)")
    else:
        print(f"{total}, {format_bytes(need.limit_bytes)} given: largest batch {need.largest_batch:,}")


def _verdict(needs: tuple[TierNeed, ...], batch: int) -> int:
    limited = [need for need in needs if need.largest_batch is not None]
    short = [need for need in limited if need.largest_batch < batch]
    if not limited:
        print("\nno tier has a limit: give --hbm or --dram to see whether it fits")
        return FITS
    largest = min(need.largest_batch for need in limited)
    if not short:
        print(f"\nfits: batch {batch} of at most {largest}")
        return FITS
    missing = ", ".join(f"{need.request_bytes * batch - need.limit_bytes:,} bytes of {need.name}" for need in short)
    print(f"\ndoes not fit: {missing} are missing; the largest batch is {largest}")
    return DOES_NOT_FIT
