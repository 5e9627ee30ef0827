"""Stage C: exact attention over sink, selected and local chunks, in ascending chunk id, in the arena or in place."""

from __future__ import annotations

import torch
from kvdrive_kernels.attend_home import attend_home
from kvdrive_kernels.attend_slots import attend_slots

from sglang_kvdrive.decode.step import Part
from sglang_kvdrive.sequences import SequenceBook
from sglang_kvdrive.tiers.hbm import HbmTier
from sglang_kvdrive.tiers.transfer import Transfer
from sglang_kvdrive.values import Lookup, Selection


def attend(
    hbm: HbmTier, part: Part, layer: int, q: torch.Tensor, scale: float, selection: Selection | None, lookup: Lookup | None
) -> torch.Tensor:
    """Attend what is resident.

    The order of the selected chunks is their id, whatever their slots: window sizes, eviction and tiers cannot change
    a single bit of the result.

    Args:
        q: `[b, H_kv, G, D]`.

    Returns:
        `[b, H_kv, G, D]`.
    """
    n_batch, n_heads = q.shape[:2]

    def per_head(valid: torch.Tensor) -> torch.Tensor:
        return valid.unsqueeze(1).expand(n_batch, n_heads, -1)

    steady = part.steady
    slots = [steady.sink_slots[layer], steady.zone_slots[layer]]
    valid = [per_head(steady.sink_valid), per_head(steady.zone_valid)]
    if selection is not None:
        ids, order = selection.chunk_ids.sort(dim=-1)
        slots.insert(1, lookup.slot_ids.gather(-1, order))
        valid.insert(1, torch.where(ids >= 0, hbm.layout.chunk_size, 0))
    return attend_slots(q, hbm.arena, torch.cat(slots, dim=-1), torch.cat(valid, dim=-1), scale)


def attend_in_place(
    book: SequenceBook, transfer: Transfer, part: Part, layer: int, q: torch.Tensor, scale: float, selection: Selection | None
) -> torch.Tensor:
    """Attend chunks where they lie at home; the same chunks in the same order as `attend`.

    Args:
        q: `[b, H_kv, G, D]`.

    Returns:
        `[b, H_kv, G, D]`.
    """
    if selection is None:
        chunk_ids, n_wanted = torch.empty(*q.shape[:2], 0, dtype=torch.int32), torch.zeros_like(part.seq_ids)
    else:
        chunk_ids, n_wanted = selection.chunk_ids, part.n_wanted
    places = (transfer.home, layer, book.blocks, part.seq_ids)
    return attend_home(q, *places, part.n_tokens, part.n_sink, part.zone_begin, chunk_ids, n_wanted, scale)
