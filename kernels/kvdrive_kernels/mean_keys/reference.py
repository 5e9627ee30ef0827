"""Plain PyTorch twin of `mean_keys`."""

from __future__ import annotations

import torch


def mean_keys(keys: torch.Tensor) -> torch.Tensor:
    """Average the keys of each chunk in fp32.

    Args:
        keys: `[..., C, D]`, any float dtype, post-RoPE.

    Returns:
        `[..., D]` fp32.
    """
    return keys.float().mean(dim=-2)
