"""Plain PyTorch twin of `gather_chunks`."""

from __future__ import annotations

import torch


def gather_chunks(source: torch.Tensor, source_rows: torch.Tensor, target: torch.Tensor, target_slots: torch.Tensor) -> None:
    """`target[target_slots] = source[source_rows]`, chunk by chunk. Mutates `target`.

    Args:
        source: `[N, E]`, E elements of one chunk (K and V).
        source_rows: `[M]` int64.
        target: `[S, E]`, same dtype.
        target_slots: `[M]` int64, distinct.
    """
    target.index_copy_(0, target_slots, source.index_select(0, source_rows))
