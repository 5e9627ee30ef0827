"""`attend_slots` in C++: attend_slots.h."""

from __future__ import annotations

import torch


def attend_slots(library, q, arena, slot_ids, n_valid, scale):
    out = torch.empty(q.shape, dtype=q.dtype)
    library.attend_slots(q.contiguous(), arena, slot_ids.int().contiguous(), n_valid.int().contiguous(), scale, out)
    return out
