"""Plain PyTorch twin of `attend_slots`."""

from __future__ import annotations

import torch


def attend_slots(
    q: torch.Tensor, arena: torch.Tensor, slot_ids: torch.Tensor, n_valid: torch.Tensor, scale: float
) -> torch.Tensor:
    """Exact attention of one token per sequence over the tokens of the given slots, fp32 accumulation.

    Args:
        q: `[B, H_kv, G, D]`.
        arena: `[S, 2, C, D]`, K and V of a chunk per slot.
        slot_ids: `[B, H_kv, F]` int, in ascending chunk id, any value where `n_valid` is 0.
        n_valid: `[B, H_kv, F]` int, tokens of each slot that count, 0 to C. At least one token per (sequence, head) counts.
        scale: factor on q·k.

    Returns:
        `[B, H_kv, G, D]` in the dtype of q.
    """
    n_batch, n_heads, n_slots = slot_ids.shape
    chunk_size, dim = arena.shape[2:]
    chunks = arena[slot_ids.masked_fill(n_valid == 0, 0).long()]
    keys = chunks[..., 0, :, :].float().reshape(n_batch, n_heads, n_slots * chunk_size, dim)
    values = chunks[..., 1, :, :].float().reshape(n_batch, n_heads, n_slots * chunk_size, dim)
    counts = torch.arange(chunk_size, device=q.device) < n_valid.unsqueeze(-1)
    counts = counts.reshape(n_batch, n_heads, 1, n_slots * chunk_size)
    logits = torch.matmul(q.float(), keys.transpose(-1, -2)) * scale
    weights = torch.softmax(logits.masked_fill(~counts, float("-inf")), dim=-1)
    # A slot may hold stale or uninitialised bytes where it does not count: 0 * NaN must not reach the sum.
    values.masked_fill_(~counts.transpose(-1, -2), 0.0)
    return torch.matmul(weights, values).to(q.dtype)
