"""`attend_slots` in C++: attend_slots.h."""

from __future__ import annotations

import torch


def attend_slots(library, q, arena, slot_ids, n_valid, scale, logit_cap=0.0, n_skipped=None):
    n_skipped = slot_ids[..., :0] if n_skipped is None else n_skipped
    out = torch.empty(q.shape, dtype=q.dtype)
    books = (books.int().contiguous() for books in (slot_ids, n_valid, n_skipped))
    library.attend_slots(q.contiguous(), arena, *books, scale, logit_cap, out)
    return out
