"""Plain PyTorch twin of `attend_slots`."""

from __future__ import annotations

import torch


def attend_slots(
    q: torch.Tensor,
    arena: torch.Tensor,
    slot_ids: torch.Tensor,
    n_valid: torch.Tensor,
    scale: float,
    logit_cap: float = 0.0,
    n_skipped: torch.Tensor | None = None,
) -> torch.Tensor:
    """Exact attention of one token per sequence over the tokens of the given slots, fp32 accumulation.

    Args:
        q: `[B, H_kv, G, D]`.
        arena: `[S, 2, C, D]`, K and V of a chunk per slot.
        slot_ids: `[B, H_kv, F]` int, in ascending chunk id, any value where `n_valid` is 0.
        n_valid: `[B, H_kv, F]` int, tokens of each slot that count, 0 to C. At least one token per (sequence, head) counts.
        scale: factor on q·k.
        logit_cap: logits become `logit_cap * tanh(logit / logit_cap)`; 0: they stay.
        n_skipped: `[B, H_kv, F]` int, at most `n_valid`: tokens at the beginning of each slot that a sliding window has
            left behind; None: none.

    Returns:
        `[B, H_kv, G, D]` in the dtype of q.
    """
    n_batch, n_heads, n_slots = slot_ids.shape
    chunk_size, dim = arena.shape[2:]
    chunks = arena[slot_ids.masked_fill(n_valid == 0, 0).long()]
    keys = chunks[..., 0, :, :].float().reshape(n_batch, n_heads, n_slots * chunk_size, dim)
    values = chunks[..., 1, :, :].float().reshape(n_batch, n_heads, n_slots * chunk_size, dim)
    lane = torch.arange(chunk_size, device=q.device)
    counts = lane < n_valid.unsqueeze(-1)
    if n_skipped is not None:
        counts &= lane >= n_skipped.unsqueeze(-1)
    counts = counts.reshape(n_batch, n_heads, 1, n_slots * chunk_size)
    logits = torch.matmul(q.float(), keys.transpose(-1, -2)) * scale
    logits = cap_logits(logits, logit_cap)
    weights = torch.softmax(logits.masked_fill(~counts, float("-inf")), dim=-1)
    # A slot may hold stale or uninitialised bytes where it does not count: 0 * NaN must not reach the sum.
    values.masked_fill_(~counts.transpose(-1, -2), 0.0)
    return torch.matmul(weights, values).to(q.dtype)


def cap_logits(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Soft cap of Gemma 2: logits beyond the cap are pressed under it; a cap of 0 caps nothing."""
    return cap * torch.tanh(logits / cap) if cap else logits
