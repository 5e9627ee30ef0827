"""`attend_pieces` in C++: attend_pieces.h."""

from __future__ import annotations

import torch


def attend_pieces(library, q, home, layer, blocks, seq_ids, starts, prefix, lengths, scale, logit_cap=0.0, window=0):
    if q.stride(-1) != 1 or q.stride(-2) != q.shape[-1]:
        q = q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    library.attend_pieces(q, home, layer, blocks, seq_ids, starts, prefix, lengths, scale, logit_cap, window, out)
    return out
