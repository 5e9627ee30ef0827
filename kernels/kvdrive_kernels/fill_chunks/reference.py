"""Plain PyTorch twin of `fill_chunks`."""

from __future__ import annotations

from collections.abc import Callable

import torch


def fill_chunks(
    scores: torch.Tensor,
    begins: torch.Tensor,
    sizes: torch.Tensor,
    members: torch.Tensor,
    n_wanted: torch.Tensor,
    chunk_scores: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take groups best first until exactly `n_wanted` chunks are chosen; the group that does not fit is cut by chunk score.

    Args:
        scores: `[B, H_kv, N_g]` fp32, higher is better; ties go to the lower group id. Empty groups come last.
        begins: `[B, H_kv, N_g]` int, position of a group's first member in `members`.
        sizes: `[B, H_kv, N_g]` int, members of a group, 0 = no such group.
        members: `[B, H_kv, M]` int32, chunk ids in group order.
        n_wanted: `[B]` int, chunks to choose; at most the number of indexed chunks of the sequence.
        chunk_scores: scores the candidates `[B, H_kv, X]` (chunk ids, -1 padded) of the cut groups, `[B, H_kv, X]` fp32.

    Returns:
        chunk_ids `[B, H_kv, K]` int32 and group_ids `[B, H_kv, K]` int32, ranked best first, -1 beyond `n_wanted`;
        K is the largest `n_wanted`.
    """
    k = int(n_wanted.max())
    order = torch.argsort(scores, dim=-1, descending=True, stable=True)
    ranked_sizes = sizes.gather(-1, order).long()
    ends = ranked_sizes.cumsum(-1)
    position = torch.arange(k, device=scores.device).expand(*scores.shape[:2], k)
    rank = torch.searchsorted(ends, position.contiguous(), right=True).clamp_max(scores.shape[-1] - 1)
    group = order.gather(-1, rank)
    offset = position - (ends - ranked_sizes).gather(-1, rank)
    place = begins.gather(-1, group).long() + offset
    beyond = position >= n_wanted.view(-1, 1, 1)
    chunks = members.gather(-1, place.clamp(0, members.shape[-1] - 1))
    chunks = _cut_last_group(chunks, order, ends, ranked_sizes, begins, members, n_wanted, chunk_scores)
    return chunks.masked_fill(beyond, -1).int(), group.masked_fill(beyond, -1).int()


def _cut_last_group(chunks, order, ends, ranked_sizes, begins, members, n_wanted, chunk_scores):
    """Replace the members of the group that does not fit whole by its best ones, best first."""
    k = chunks.shape[-1]
    wanted = n_wanted.view(-1, 1, 1).expand(*chunks.shape[:2], 1)
    rank = torch.searchsorted(ends, (wanted - 1).contiguous(), right=True).clamp_max(ends.shape[-1] - 1)
    size = ranked_sizes.gather(-1, rank)
    first = ends.gather(-1, rank) - size  # chunks chosen before the cut group
    kept = wanted - first
    is_cut = kept < size
    width = int(torch.where(is_cut, size, 0).max())
    if width == 0:
        return chunks
    lane = torch.arange(width, device=chunks.device).expand(*chunks.shape[:2], width)
    inside = (lane < size) & is_cut
    begin = begins.gather(-1, order.gather(-1, rank)).long()
    candidates = members.gather(-1, (begin + lane).clamp(0, members.shape[-1] - 1)).masked_fill(~inside, -1)
    values = chunk_scores(candidates).masked_fill(~inside, float("-inf"))
    best = candidates.gather(-1, torch.argsort(values, dim=-1, descending=True, stable=True))
    target = (first + lane).masked_fill((lane >= kept) | ~is_cut, k)
    padded = torch.cat([chunks, chunks.new_zeros(*chunks.shape[:2], 1)], dim=-1)
    return padded.scatter(-1, target.clamp_max(k), best)[..., :k]
