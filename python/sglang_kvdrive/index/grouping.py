"""Build the two levels of the index for one sealed segment: chunk means, then groups of similar chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kvdrive_kernels.group_keys import group_keys
from kvdrive_kernels.mean_keys import mean_keys

from sglang_kvdrive.layout import ceil_div


@dataclass(frozen=True)
class Groups:
    """The groups of one segment of one layer.

    Attributes:
        centroids: `[H_kv, N_g, D]` fp32, mean key of the members, 0 where empty.
        sizes: `[H_kv, N_g]` int64, chunks per group, 0 = empty.
        members: `[H_kv, M]` int64, chunk numbers within the segment, group after group.
    """

    centroids: torch.Tensor
    sizes: torch.Tensor
    members: torch.Tensor


def n_groups_of(n_chunks: int, chunk_size: int, tokens_per_group: int) -> int:
    """Groups of a segment: one for every `tokens_per_group` tokens, the last one may stand for fewer."""
    return ceil_div(n_chunks * chunk_size, tokens_per_group)


def group_segment(keys: torch.Tensor, tokens_per_group: int, iterations: int) -> Groups:
    """Group the chunks of one segment of one layer, each KV head by itself.

    Args:
        keys: `[H_kv, M, C, D]`, post-RoPE, any float dtype.
        tokens_per_group: index tokens per centroid.
        iterations: Lloyd steps.
    """
    _, n_chunks, chunk_size, _ = keys.shape
    labels, centroids, sizes = group_keys(mean_keys(keys), n_groups_of(n_chunks, chunk_size, tokens_per_group), iterations)
    return Groups(centroids, sizes, torch.argsort(labels, dim=-1, stable=True))
