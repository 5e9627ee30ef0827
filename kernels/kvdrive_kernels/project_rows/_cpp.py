"""`project_rows` in C++: project_rows.h."""

from __future__ import annotations

import torch


def project_rows(library, x, weight):
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
    library.project_rows(x.contiguous(), weight, out)
    return out
