"""Plain PyTorch twin of `probe_books`."""

from __future__ import annotations

import torch

from kvdrive_kernels.probe_window.reference import probe_window

EMPTY = -1


def probe_books(
    chunks: torch.Tensor,
    groups: torch.Tensor,
    stamps: torch.Tensor,
    slots: torch.Tensor,
    n_entries: torch.Tensor,
    seq_ids: torch.Tensor,
    chunk_ids: torch.Tensor,
    group_ids: torch.Tensor,
    scores: torch.Tensor,
    now: int,
    *,
    by_score: bool,
    stamps_hits: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hits, misses and victims of one layer, entered in its books. Mutates `chunks`, `groups` and `stamps`.

    Free entries go first, then resident chunks that this step did not select (`probe_window`).

    Args:
        chunks, groups, slots: `[sequences, H_kv, W]` int32, stamps: the same, int64: the books of one layer; chunk -1 = free.
        n_entries: `[sequences]` int64, entries that the windows of a sequence have, at most W.
        seq_ids: `[B]` int64.
        chunk_ids, group_ids: `[B, H_kv, K]` int32, ranked, -1 padded.
        scores: `[B, H_kv, N_g]` fp32, this step's score of every group.
        now: stamp of the worst rank; within a step a better rank is younger.
        by_score: victims are the chunks whose group scores lowest now, ties to the older stamp; else only the stamp counts.
        stamps_hits: a hit renews the stamp.

    Returns:
        slot_ids `[B, H_kv, K]` int32, 0 where padded; misses `[B, H_kv, K]` bool;
        counts `[B, 3]` int64: hits, misses, evictions over the heads.
    """
    k, width = chunk_ids.shape[-1], int(n_entries[seq_ids].max())
    held, of_group, ages, places = (book[seq_ids, :, :width] for book in (chunks, groups, stamps, slots))
    priority = scores.gather(-1, of_group.long()) if by_score else ages
    entries, hits = probe_window(chunk_ids, held, priority, ages, n_entries[seq_ids])
    valid = chunk_ids >= 0
    misses = valid & ~hits
    evicted = misses & (held.gather(-1, entries) != EMPTY)
    renewed = valid if stamps_hits else misses
    times = (now + k - 1 - torch.arange(k)).expand_as(entries)
    for book, old, values, mask in (
        (chunks, held, chunk_ids, misses),
        (groups, of_group, group_ids, valid),
        (stamps, ages, times, renewed),
    ):
        padded = torch.cat([old, old.new_zeros(*old.shape[:2], 1)], dim=-1)
        padded.scatter_(-1, entries.masked_fill(~mask, width), values.to(old.dtype))
        book[seq_ids, :, :width] = padded[..., :width]
    slot_ids = places.gather(-1, entries).masked_fill(~valid, 0)
    return slot_ids, misses, torch.stack([t.sum((1, 2)) for t in (hits, misses, evicted)], dim=1)
