"""`norm_rows` in C++: norm_rows.h."""

from __future__ import annotations

import torch


def norm_rows(library, x, residual, weight, epsilon):
    x = x.contiguous()
    out = torch.empty_like(x)
    if residual is None:
        nothing = x[:0]
        library.norm_rows(x, nothing, weight, epsilon, out, nothing)
        return out, None
    total = torch.empty_like(x)
    library.norm_rows(x, residual.contiguous(), weight, epsilon, out, total)
    return out, total
