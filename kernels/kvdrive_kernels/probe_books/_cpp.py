"""`probe_books` in C++: probe_books.h."""

from __future__ import annotations

import torch


def probe_books(
    library, chunks, groups, stamps, slots, n_entries, seq_ids, chunk_ids, group_ids, scores, now, *, by_score, stamps_hits
):
    slot_ids = torch.empty(chunk_ids.shape, dtype=torch.int32)
    misses = torch.empty(chunk_ids.shape, dtype=torch.bool)
    counts = torch.empty(chunk_ids.shape[0], 3, dtype=torch.int64)
    library.probe_books(
        chunks, groups, stamps, slots, n_entries, seq_ids, chunk_ids.contiguous(), group_ids.contiguous(), scores.contiguous(),
        now, by_score, stamps_hits, slot_ids, misses, counts,
    )  # fmt: skip
    return slot_ids, misses, counts
