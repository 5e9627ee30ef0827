"""`attend_home` in C++: attend_home.h."""

from __future__ import annotations

import torch


def attend_home(
    library, q, home, layer, blocks, seq_ids, n_tokens, n_sink, zone_begin, chunk_ids, n_wanted, scale, logit_cap=0.0, window=0
):
    out = torch.empty(q.shape, dtype=q.dtype)
    library.attend_home(
        q.contiguous(), home, layer, blocks, seq_ids, n_tokens, n_sink, zone_begin, chunk_ids, n_wanted, scale, logit_cap,
        window, out,
    )  # fmt: skip
    return out
