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
        at: `[b]` int64, places in the batch.
        seq_ids: `[b]` int64.
        sink_slots: `[L, b, H_kv, n_sink]`, zone_slots: `[L, b, H_kv, n_zone]` int32.
        sink_valid: `[b, n_sink]`, zone_valid: `[b, n_zone]` int64, tokens that count in each steady chunk.
        n_wanted: `[b]` int64, chunks to select, or None if this part selects nothing.
        shape: K, chunks to select at most, and N_g, groups of the longest index, or None.
    """

    at: torch.Tensor
    seq_ids: torch.Tensor
    sink_slots: torch.Tensor
    zone_slots: torch.Tensor
    sink_valid: torch.Tensor
    zone_valid: torch.Tensor
    n_wanted: torch.Tensor | None = None
    shape: tuple[int, int] | None = None


@dataclass(frozen=True)
class DecodePlan:
    """One decode step of a batch.

    Attributes:
        seq_ids: `[B]` int64.
        rows: `[B, H_kv]` int64, home of the new token's chunk at layer 0 (`Transfer.home_places`).
        slots: `[L, B, H_kv]` int64, steady slot of that chunk.
        inside: `[B]` int64, place of the new token in its chunk.
        parts: disjoint parts that together are the batch.
        attended: `[B]` int64, tokens that each (layer, KV head) of a sequence attends in this step.
    """

    seq_ids: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
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
    last = book.n_tokens[seq_ids] - 1
    chunk = last // layout.chunk_size
    slots = zones.slots_at(seq_ids, chunk.unsqueeze(1)).squeeze(-1).long()
    n_wanted = torch.minimum(book.budget_chunks[seq_ids], index.n_chunks[seq_ids])
    parts = []
    attended = torch.zeros_like(last)
    for selects in (False, True):
        at = ((n_wanted > 0) == selects).nonzero().flatten()
        if at.numel():
            part = _plan_part(layout, config, book, zones, index, at, seq_ids[at], n_wanted[at] if selects else None)
            attended[at] = part.sink_valid.sum(1) + part.zone_valid.sum(1)
            if selects:
                attended[at] += n_wanted[at] * layout.chunk_size
            parts.append(part)
    rows, inside = transfer.home_places(book.blocks[seq_ids, last // BLOCK_TOKENS], last % BLOCK_TOKENS)
    return DecodePlan(seq_ids, rows, slots.contiguous(), inside, tuple(parts), attended)


def _plan_part(layout, config, book, zones, index, at, seq_ids, n_wanted) -> Part:
    n_tokens = book.n_tokens[seq_ids]
    sink = torch.arange(config.sink_chunks).expand(at.numel(), -1)
    # What follows the sink and is not indexed: from the end of the sealed region (of the sink, if none) to the newest token.
    first = book.sealed_end[seq_ids].clamp_min(config.sink_chunks * layout.chunk_size) // layout.chunk_size
    stop = (n_tokens + layout.chunk_size - 1) // layout.chunk_size
    zone = first.unsqueeze(1) + torch.arange(int((stop - first).max().clamp_min(0)))
    shape = None if n_wanted is None else (int(n_wanted.max()), int(index.n_pages[seq_ids].max()) * config.groups_per_page)
    return Part(
        at,
        seq_ids,
        zones.slots_at(seq_ids, sink),
        zones.slots_at(seq_ids, zone),
        _valid_tokens(layout, n_tokens, sink),
        _valid_tokens(layout, n_tokens, zone),
        n_wanted,
        shape,
    )


def _valid_tokens(layout: KVLayout, n_tokens: torch.Tensor, chunk_ids: torch.Tensor) -> torch.Tensor:
    """Tokens of each chunk that exist: C, less in the last chunk, 0 after it."""
    return (n_tokens.unsqueeze(1) - chunk_ids * layout.chunk_size).clamp(0, layout.chunk_size)
