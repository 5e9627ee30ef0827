"""Plain PyTorch twin of `project_rows`."""

from __future__ import annotations

import torch


def project_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T` for a few rows, accumulated in fp32.

    Args:
        x: `[T, K]`.
        weight: `[N, K]`, same dtype.

    Returns:
        `[T, N]` in the dtype of x.
    """
    return (x.float() @ weight.float().T).to(x.dtype)
