"""Plain PyTorch twin of `merge_state`."""

from __future__ import annotations

import torch


def merge_state(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys, from the results over each (FlashInfer's cascade merge).

    Args:
        out_a, out_b: `[..., D]`.
        lse_a, lse_b: `[...]` fp32.

    Returns:
        out `[..., D]` fp32, lse `[...]` fp32.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    share_a = torch.exp(lse_a - lse).unsqueeze(-1)
    share_b = torch.exp(lse_b - lse).unsqueeze(-1)
    return out_a.float() * share_a + out_b.float() * share_b, lse
