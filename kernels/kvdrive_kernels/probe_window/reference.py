"""Plain PyTorch twin of `probe_window`."""

from __future__ import annotations

import torch

_KIND_SHIFT = 61
_AGE_BITS = 29


def probe_window(
    chunk_ids: torch.Tensor, resident: torch.Tensor, priority: torch.Tensor, stamps: torch.Tensor, n_entries: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Match a selection with a window and choose the entries that misses will use.

    Free entries go first, then resident chunks that this step did not select, lowest priority first, ties to the older
    stamp (lookahead eviction after KVDrive and ArkVale: priority = the current selector score). A selected chunk is
    never a victim.

    Args:
        chunk_ids: `[B, H_kv, K]` int32, distinct within a head, -1 padded; at most `n_entries` are not -1.
        resident: `[B, H_kv, W]` int32, chunk held by each window entry, -1 = free.
        priority: `[B, H_kv, W]` fp32 or int64 from 0 up, value of each resident chunk, higher stays. An int64 priority is
            the stamp itself.
        stamps: `[B, H_kv, W]` int64, age of each entry, lower is older.
        n_entries: `[B]` int, entries that the window of each sequence really has, at most W.

    Returns:
        entries `[B, H_kv, K]` int64: the window entry of each selected chunk after this step (0 where padded);
        hits `[B, H_kv, K]` bool.
    """
    n_batch, n_heads, _k = chunk_ids.shape
    w = resident.shape[-1]
    ranked, order = resident.sort(dim=-1, stable=True)
    found = torch.searchsorted(ranked, chunk_ids.contiguous()).clamp_max(w - 1)
    valid = chunk_ids >= 0
    hits = valid & (ranked.gather(-1, found) == chunk_ids)
    entries = order.gather(-1, found)
    selected = torch.zeros(n_batch, n_heads, w + 1, dtype=torch.bool, device=chunk_ids.device)
    selected.scatter_(-1, torch.where(hits, entries, w), True)
    usable = torch.arange(w, device=chunk_ids.device) < n_entries.view(-1, 1, 1)
    victims = _victim_order(resident, priority, stamps, ~selected[..., :w] & usable)
    misses = valid & ~hits
    nth_miss = (misses.cumsum(-1) - 1).clamp_min(0)
    entries = torch.where(hits, entries, victims.gather(-1, nth_miss))
    return entries.masked_fill(~valid, 0), hits


def _victim_order(resident, priority, stamps, evictable) -> torch.Tensor:
    """Entries in the order in which they may be given up: by class (free, evictable, protected), priority, stamp.

    The three are packed into one integer, so that one sort does it: 2 bits of class, 32 of priority, 29 of age.
    """
    kind = torch.where(resident < 0, 0, 1).masked_fill_(~evictable, 2)
    if not priority.dtype.is_floating_point:
        return torch.argsort((kind << _KIND_SHIFT) | priority, dim=-1, stable=True)
    # Bits of a non-negative float grow with its value. Ages count back from the newest: whatever is more than 2^29 older ties.
    newest = stamps.amax(dim=-1, keepdim=True)
    age = (stamps - newest + ((1 << _AGE_BITS) - 1)).clamp_min_(0)
    bits = priority.clamp_min(0).view(torch.int32).long()
    return torch.argsort((kind << _KIND_SHIFT) | (bits << _AGE_BITS) | age, dim=-1, stable=True)
