"""Plain PyTorch twin of `store_tokens`."""

from __future__ import annotations

import torch


def store_tokens(
    pool: torch.Tensor, rows: torch.Tensor, offset: int, inside: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Write the K and V of tokens into their chunks. Mutates `pool`.

    Args:
        pool: `[R, 2, C, D]`, the home or the arena, chunk after chunk.
        rows: `[T, H_kv]` int64, row of the chunk of each token and head.
        offset: added to every row (the distance of a layer from the first one).
        inside: `[T]` int64, position of each token within its chunk.
        k, v: `[T, H_kv, D]`; only the last two dimensions need be contiguous.
    """
    at = inside.unsqueeze(1)
    pool[rows + offset, 0, at] = k
    pool[rows + offset, 1, at] = v
