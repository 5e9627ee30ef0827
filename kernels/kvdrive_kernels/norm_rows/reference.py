"""Plain PyTorch twin of `norm_rows`."""

from __future__ import annotations

import torch


def norm_rows(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """RMS norm (Zhang and Sennrich, 2019) of `x + residual`, computed in fp32.

    Args:
        x: `[T, D]`.
        residual: `[T, D]` of the same dtype, or None.
        weight: `[D]` of the same dtype.
        epsilon: added to the mean square.

    Returns:
        The normed rows and the sum (None without a residual), both `[T, D]` in the dtype of x.
    """
    rows = x.float()
    total = None
    if residual is not None:
        rows = rows + residual.float()
        total = rows.to(x.dtype)
    scale = torch.rsqrt(rows.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    return (rows * scale * weight).to(x.dtype), total
