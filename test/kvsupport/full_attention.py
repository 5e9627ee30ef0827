"""Full causal attention in float64 with numpy: what every exact path must reproduce."""

from __future__ import annotations

import numpy as np
import torch


def as_float64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to(torch.float64).numpy()


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, first: int = 0) -> torch.Tensor:
    """Query t stands at position `first + t` and sees the keys 0 to `first + t`.

    Args:
        q: `[T, H_q, D]`. k, v: `[S, H_kv, D]`.

    Returns:
        `[T, H_q, D]` float64.
    """
    queries, keys, values = as_float64(q), as_float64(k), as_float64(v)
    n_tokens, n_q_heads, _ = queries.shape
    n_stored, n_kv_heads, _ = keys.shape
    hidden = np.arange(n_stored) > first + np.arange(n_tokens)[:, None]
    out = np.empty_like(queries)
    for q_head in range(n_q_heads):
        head = q_head // (n_q_heads // n_kv_heads)
        logits = queries[:, q_head] @ keys[:, head].T * scale
        logits[hidden] = -np.inf
        out[:, q_head] = softmax(logits) @ values[:, head]
    return torch.from_numpy(out)


def attend_tokens(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: list[list[int]], scale: float) -> torch.Tensor:
    """One query attends exactly the given tokens.

    Args:
        q: `[H_q, D]`. k, v: `[S, H_kv, D]`.
        tokens: positions per KV head.

    Returns:
        `[H_q, D]` float64.
    """
    queries, keys, values = as_float64(q), as_float64(k), as_float64(v)
    q_per_kv = queries.shape[0] // keys.shape[1]
    out = np.empty_like(queries)
    for q_head in range(queries.shape[0]):
        head = q_head // q_per_kv
        weights = softmax(keys[tokens[head], head] @ queries[q_head] * scale)
        out[q_head] = weights @ values[tokens[head], head]
    return torch.from_numpy(out)
