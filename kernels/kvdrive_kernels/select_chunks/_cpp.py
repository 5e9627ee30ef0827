"""`select_chunks` in C++: select_chunks.h."""

from __future__ import annotations

import torch


def select_chunks(
    library, q, arena, slots, begins, sizes, members, pages, n_pages, home, layer, blocks, seq_ids, n_wanted, shape, scale,
    logit_cap=0.0,
):  # fmt: skip
    n_batch, n_heads = q.shape[:2]
    k, n_groups = shape
    chunk_ids = torch.empty(n_batch, n_heads, k, dtype=torch.int32)
    group_ids = torch.empty(n_batch, n_heads, k, dtype=torch.int32)
    scores = torch.empty(n_batch, n_heads, n_groups)
    library.select_chunks(
        q.contiguous(), arena, slots, begins, sizes, members, pages, n_pages, home, layer, blocks, seq_ids, n_wanted, scale,
        logit_cap, chunk_ids, group_ids, scores,
    )  # fmt: skip
    return chunk_ids, group_ids, scores
