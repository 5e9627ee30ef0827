"""Turn "auto" into numbers: how much DRAM, how much HBM, from which length on attention is sparse."""

from __future__ import annotations

from sglang_kvdrive.config import KVDriveConfig, format_bytes
from sglang_kvdrive.engine import check_fits
from sglang_kvdrive.errors import ConfigError
from sglang_kvdrive.layout import BLOCK_TOKENS, KVLayout, ceil_div

DRAM_SHARE = 0.5
"""Part of the free memory that `--kvdrive-dram auto` takes: the model's activations and other programs need the rest."""
HEADROOM_BYTES = 512 << 20
"""What must stay free beside the tiers, whoever chose their sizes."""


def resolve_memory(
    config: KVDriveConfig, layout: KVLayout, *, context_len: int, max_requests: int, available_bytes: int, break_even_tokens: int
) -> KVDriveConfig:
    """Fill in `dram_bytes`, `hbm_bytes` and `dense_below` for the cpu device.

    Args:
        context_len: longest request.
        max_requests: sequences at a time.
        available_bytes: memory that can be taken now (machine and cgroup), after the model was loaded.
        break_even_tokens: length below which exact attention is not slower than sparse attention on this device.

    Raises:
        ConfigError: sizes that the machine does not have or that cannot serve one request, with every reason.
    """
    dram = config.dram_bytes
    if dram is None:
        useful = max_requests * ceil_div(context_len, BLOCK_TOKENS) * layout.block_bytes
        dram = min(useful, int(available_bytes * DRAM_SHARE))
    dram = dram // layout.block_bytes * layout.block_bytes
    longest = longest_request(layout, dram, context_len)
    hbm = _index_bytes(config, layout, dram, max_requests) if config.in_place else config.hbm_bytes
    config = config.resolve(
        dram_bytes=dram, hbm_bytes=hbm, dense_below=_dense_below(config, layout, hbm, longest, break_even_tokens)
    )
    reasons = []
    try:
        check_fits(layout, config, longest)
    except ConfigError as error:
        reasons += error.reasons
    if dram + hbm + HEADROOM_BYTES > available_bytes:
        reasons.append(
            f"--kvdrive-dram {format_bytes(dram)} and --kvdrive-hbm {format_bytes(hbm)} with {format_bytes(HEADROOM_BYTES)} "
            f"headroom are more than the {format_bytes(available_bytes)} that are free here: lower them, or use auto"
        )
    if reasons:
        raise ConfigError(reasons)
    return config


def longest_request(layout: KVLayout, dram_bytes: int, context_len: int) -> int:
    """Tokens of the longest request that can exist: the context length, or what DRAM holds."""
    return max(1, min(context_len, dram_bytes // layout.block_bytes * BLOCK_TOKENS))


def in_place_if_auto(config: KVDriveConfig) -> KVDriveConfig:
    """On the cpu there is no second memory to fill: without a size for the arena, chunks are attended where they lie."""
    return config.resolve(in_place=config.hbm_bytes is None)


def _index_bytes(config: KVDriveConfig, layout: KVLayout, dram: int, max_requests: int) -> int:
    """The index of everything that DRAM can hold, when nothing else is kept beside it."""
    capacity = dram // layout.block_bytes * BLOCK_TOKENS
    n_pages = ceil_div(capacity, config.page_tokens) + max_requests
    return n_pages * config.page_slots(layout) * layout.n_pairs * layout.slot_bytes


def _dense_below(config: KVDriveConfig, layout: KVLayout, hbm: int, longest: int, break_even_tokens: int) -> int:
    """What the user said; or the device's break-even, at least what a step attends anyway, at most what the arena holds."""
    if config.dense_below is not None:
        return min(config.dense_below, longest)
    attended_anyway = config.budget.budget_entries(0) + config.sink_chunks * layout.chunk_size + config.local_tokens
    if config.in_place:
        return min(max(break_even_tokens, attended_anyway), longest)
    held = hbm // (layout.n_pairs * layout.slot_bytes) * layout.chunk_size // BLOCK_TOKENS * BLOCK_TOKENS
    return min(max(break_even_tokens, attended_anyway), held, longest)
