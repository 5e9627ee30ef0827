"""`rotate_heads` in C++: rotate_heads.h."""

from __future__ import annotations

import torch


def rotate_heads(library, q, k, positions, cos_sin, head_dim, halves):
    q_out, k_out = torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype)
    library.rotate_heads(q, k, positions, cos_sin, head_dim, halves, q_out, k_out)
    return q_out, k_out
