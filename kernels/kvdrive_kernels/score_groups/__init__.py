"""Score every group for the queries of one KV head: softmax over centroids, summed over the query heads."""

from kvdrive_kernels.dispatch import Kernel
from kvdrive_kernels.score_groups.reference import score_groups as reference

score_groups = Kernel("score_groups", cpu=reference)

__all__ = ["reference", "score_groups"]
