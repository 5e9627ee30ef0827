"""`group_keys` in C++: group_keys.h."""

from __future__ import annotations

import torch


def group_keys(library, vectors, n_groups, iterations):
    n_problems, n_vectors, dim = vectors.shape
    labels = torch.empty(n_problems, n_vectors, dtype=torch.int64)
    centroids = torch.empty(n_problems, n_groups, dim)
    sizes = torch.empty(n_problems, n_groups, dtype=torch.int64)
    library.group_keys(vectors.contiguous(), iterations, labels, centroids, sizes)
    return labels, centroids, sizes
