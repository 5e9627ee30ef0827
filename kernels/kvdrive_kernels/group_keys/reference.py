"""Plain PyTorch twin of `group_keys`."""

from __future__ import annotations

import torch

_TINY = 1e-12


def group_keys(vectors: torch.Tensor, n_groups: int, iterations: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group vectors by inner product on centred data, segment by segment.

    The recipe is RetroInfer's `segment_k_means`: centre by the mean, start from evenly spaced vectors, assign by
    inner product with normalised centroids, and once more with the unnormalised ones at the end. Every (layer, head)
    is independent, so the result does not depend on what else is in the batch.

    Args:
        vectors: `[N, M, D]` fp32, N independent problems.
        n_groups: N_g, between 1 and M.
        iterations: Lloyd steps, the last one with unnormalised centroids.

    Returns:
        labels `[N, M]` int64, centroids `[N, N_g, D]` fp32 (mean of the members, zero if empty), sizes `[N, N_g]` int64.
    """
    n_problems, n_vectors, _dim = vectors.shape
    mean = vectors.mean(dim=1, keepdim=True)
    centred = vectors - mean
    start = torch.arange(n_groups, device=vectors.device) * n_vectors // n_groups
    centroids = centred[:, start]
    labels = torch.empty(n_problems, n_vectors, dtype=torch.int64, device=vectors.device)
    for step in range(iterations):
        if step < iterations - 1:
            centroids = centroids / centroids.norm(dim=-1, keepdim=True).clamp_min(_TINY)
        labels = torch.bmm(centred, centroids.transpose(1, 2)).max(dim=-1).indices  # argmax is 2.5 times slower
        sums, sizes = _sum_members(centred, labels, n_groups)
        # An empty group keeps its old centroid, so that it can still attract members in the next step.
        filled = sizes.clamp_min(1).unsqueeze(-1)
        centroids = torch.where(sizes.unsqueeze(-1) > 0, sums / filled, centroids)
    centroids = torch.where(sizes.unsqueeze(-1) > 0, centroids + mean, torch.zeros_like(centroids))
    return labels, centroids, sizes


def _sum_members(vectors: torch.Tensor, labels: torch.Tensor, n_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    n_problems, _n_vectors, dim = vectors.shape
    flat = (labels + torch.arange(n_problems, device=labels.device).unsqueeze(1) * n_groups).reshape(-1)
    sums = vectors.new_zeros(n_problems * n_groups, dim).index_add_(0, flat, vectors.reshape(-1, dim))
    sizes = torch.bincount(flat, minlength=n_problems * n_groups)
    return sums.view(n_problems, n_groups, dim), sizes.view(n_problems, n_groups)
