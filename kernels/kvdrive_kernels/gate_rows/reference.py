"""Plain PyTorch twin of `gate_rows`."""

from __future__ import annotations

import torch


def gate_rows(x: torch.Tensor) -> torch.Tensor:
    """The gate of SwiGLU (Shazeer, 2020): SiLU of the first half of each row times the second.

    Args:
        x: `[T, 2 * D]`.

    Returns:
        `[T, D]`.
    """
    gate, value = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * value
