"""Plain PyTorch twin of `score_groups`."""

from __future__ import annotations

import torch

from kvdrive_kernels.attend_slots.reference import cap_logits


def score_groups(
    q: torch.Tensor, centroids: torch.Tensor, sizes: torch.Tensor, scale: float, logit_cap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention mass that each group promises, by its centroid alone.

    Args:
        q: `[B, H_kv, G, D]`.
        centroids: `[B, H_kv, N_g, D]`, any float dtype.
        sizes: `[B, H_kv, N_g]` int, chunks per group; 0 = no such group. At least one group per sequence is not empty.
        scale: factor on q·k.
        logit_cap: as in `attend_slots`.

    Returns:
        scores `[B, H_kv, N_g]` fp32: softmax over the groups per query head, summed over the G heads (-1 where empty);
        lse `[B, H_kv, G]` fp32: log of the softmax denominator.
    """
    logits = torch.matmul(q.float(), centroids.float().transpose(-1, -2)) * scale
    logits = cap_logits(logits, logit_cap)
    logits = logits.masked_fill((sizes == 0).unsqueeze(2), float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    scores = torch.exp(logits - lse.unsqueeze(-1)).sum(dim=2)
    return scores.masked_fill(sizes == 0, -1.0), lse
