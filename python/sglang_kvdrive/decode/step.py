"""What one decode step reads, the same for every layer: built once, used by S, H, F and C."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_kvdrive.config import KVDriveConfig
from sglang_kvdrive.index.hierarchy import ChunkIndex
from sglang_kvdrive.layout import BLOCK_TOKENS, KVLayout
from sglang_kvdrive.sequences import SequenceBook
from sglang_kvdrive.tiers.transfer import Transfer
from sglang_kvdrive.window.zone import SteadyZones


@dataclass(frozen=True)
class Part:
    """Sequences of a batch that take the same path (with or without selection).

    Attributes:
        at: `[b]` int64, places in the batch; whole: they are the batch.
        seq_ids, n_tokens: `[b]` int64, tokens with the new one.
        n_sink: `[b]` int64, sink chunks that exist; zone_begin: `[b]` int64, first chunk of the zone at the end.
        n_wanted: `[b]` int64, chunks to select, or None if this part selects nothing.
        n_selected: chunks that the whole part selects in a layer, over the heads.
        shape: K, chunks to select at most, and N_g, groups of the longest index, or None.
        steady: slots of sink and zone, or None where chunks are attended in place.
    """

    at: torch.Tensor
    whole: bool
    seq_ids: torch.Tensor
    n_tokens: torch.Tensor
    n_sink: torch.Tensor
    zone_begin: torch.Tensor
    n_wanted: torch.Tensor | None
    n_selected: int
    shape: tuple[int, int] | None
    steady: SteadySlots | None


@dataclass(frozen=True)
class SteadySlots:
    """Where the steady chunks of a part lie in HBM.

    Attributes:
        sink_slots: `[L, b, H_kv, n_sink]`, zone_slots: `[L, b, H_kv, n_zone]` int32.
        sink_valid: `[b, n_sink]`, zone_valid: `[b, n_zone]` int64, tokens that count in each steady chunk.
    """

    sink_slots: torch.Tensor
    zone_slots: torch.Tensor
    sink_valid: torch.Tensor
    zone_valid: torch.Tensor


@dataclass(frozen=True)
class DecodePlan:
    """One decode step of a batch.

    Attributes:
        seq_ids: `[B]` int64.
        rows: `[B, H_kv]` int64, home of the new token's chunk at layer 0 (`Transfer.home_places`).
        slots: `[L, B, H_kv]` int64, steady slot of that chunk, or None where chunks are attended in place.
        inside: `[B]` int64, place of the new token in its chunk.
        parts: disjoint parts that together are the batch.
        attended: `[B]` int64, tokens that each (layer, KV head) of a sequence attends in this step.
    """

    seq_ids: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor | None
    inside: torch.Tensor
    parts: tuple[Part, ...]
    attended: torch.Tensor


def plan_decode(
    layout: KVLayout,
    config: KVDriveConfig,
    book: SequenceBook,
    zones: SteadyZones,
    index: ChunkIndex,
    transfer: Transfer,
    seq_ids: torch.Tensor,
) -> DecodePlan:
    """Plan the step whose new token is already counted in `book.n_tokens` and has its places."""
    n_tokens = book.n_tokens[seq_ids]
    last = n_tokens - 1
    slots = None
    if not config.in_place:
        slots = zones.slots_at(seq_ids, (last // layout.chunk_size).unsqueeze(1)).squeeze(-1).long().contiguous()
    # What follows the sink and is not indexed: from the end of the sealed region (of the sink, if none) to the newest token.
    sink_tokens = config.sink_chunks * layout.chunk_size
    zone_begin = book.sealed_end[seq_ids].clamp_min(sink_tokens) // layout.chunk_size
    n_wanted = torch.minimum(book.budget_chunks[seq_ids], index.n_chunks[seq_ids])
    steady = n_tokens.clamp_max(sink_tokens) + (n_tokens - zone_begin * layout.chunk_size).clamp_min(0)
    selecting = n_wanted > 0
    n_selecting = int(selecting.sum())
    parts = []
    for selects, count in ((False, seq_ids.numel() - n_selecting), (True, n_selecting)):
        if count:
            whole = count == seq_ids.numel()
            at = torch.arange(count) if whole else (selecting == selects).nonzero().flatten()
            wanted = n_wanted[at] if selects else None
            parts.append(_plan_part(layout, config, zones, index, at, whole, seq_ids[at], n_tokens[at], zone_begin[at], wanted))
    rows, inside = transfer.home_places(book.blocks[seq_ids, last // BLOCK_TOKENS], last % BLOCK_TOKENS)
    attended = steady + n_wanted * layout.chunk_size
    return DecodePlan(seq_ids, rows, slots, inside, tuple(parts), attended)


def _plan_part(layout, config, zones, index, at, whole, seq_ids, n_tokens, zone_begin, n_wanted) -> Part:
    n_chunks = (n_tokens + layout.chunk_size - 1) // layout.chunk_size
    n_sink = n_chunks.clamp_max(config.sink_chunks)
    n_selected, shape = 0, None
    if n_wanted is not None:
        n_selected = int(n_wanted.sum()) * layout.n_kv_heads
        shape = (int(n_wanted.max()), int(index.n_pages[seq_ids].max()) * config.groups_per_page)
    steady = None if config.in_place else _steady_slots(layout, config, zones, seq_ids, n_tokens, zone_begin, n_chunks)
    return Part(at, whole, seq_ids, n_tokens, n_sink, zone_begin, n_wanted, n_selected, shape, steady)


def _steady_slots(layout, config, zones, seq_ids, n_tokens, zone_begin, n_chunks) -> SteadySlots:
    sink = torch.arange(config.sink_chunks).expand(seq_ids.numel(), -1)
    zone = zone_begin.unsqueeze(1) + torch.arange(int((n_chunks - zone_begin).max().clamp_min(0)))
    return SteadySlots(
        zones.slots_at(seq_ids, sink),
        zones.slots_at(seq_ids, zone),
        _valid_tokens(layout, n_tokens, sink),
        _valid_tokens(layout, n_tokens, zone),
    )


def _valid_tokens(layout: KVLayout, n_tokens: torch.Tensor, chunk_ids: torch.Tensor) -> torch.Tensor:
    """Tokens of each chunk that exist: C, less in the last chunk, 0 after it."""
    return (n_tokens.unsqueeze(1) - chunk_ids * layout.chunk_size).clamp(0, layout.chunk_size)
