"""Plain PyTorch twin of `attend_prefix`, on torch's own flash kernel for the CPU."""

from __future__ import annotations

import torch


def attend_prefix(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of T tokens of one sequence over S keys of the same sequence.

    Args:
        q: `[H_kv, G, T, D]`.
        keys, values: `[H_kv, S, D]`.
        scale: factor on q·k.
        causal: token t sees keys 0..t only (then S == T); otherwise all S keys.

    Returns:
        out `[H_kv, G, T, D]` in the dtype of q, lse `[H_kv, G, T]` fp32.
    """
    n_heads, n_group, n_tokens, dim = q.shape
    if causal:
        shape = (1, n_heads * n_group, n_tokens, dim)
        keys = keys.unsqueeze(1).expand(-1, n_group, -1, -1).reshape(shape)
        values = values.unsqueeze(1).expand(-1, n_group, -1, -1).reshape(shape)
    else:  # all query heads of a group see the same keys: fold the group into the tokens, expand nothing
        shape = (1, n_heads, n_group * n_tokens, dim)
        keys, values = keys.unsqueeze(0), values.unsqueeze(0)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.reshape(shape), keys, values, 0.0, causal, attn_mask=None, scale=scale
    )
    return out.reshape(q.shape), lse.reshape(q.shape[:3])
