"""Look into an engine: what its index says, as plain lists and float64."""

from __future__ import annotations

import numpy as np
import torch
from sglang_kvdrive.engine import KVDriveEngine

from kvsupport.full_attention import as_float64
from kvsupport.selection import Group


def groups_of(engine: KVDriveEngine, layer: int, seq_id: int, head: int) -> list[Group]:
    """Every group of one (layer, sequence, KV head), empty ones included, in order."""
    index, layout = engine.index, engine.layout
    view = index.view(layer, *index.pages_of(torch.tensor([seq_id])))
    vectors = engine.transfer.load_vectors(view.centroid_slots[0, head])
    per_page, room = engine.config.groups_per_page, index.slots_per_page * layout.vectors_per_slot
    centroids = as_float64(vectors.view(-1, room, layout.head_dim)[:, :per_page].reshape(-1, layout.head_dim))
    groups = []
    for g, (begin, size) in enumerate(zip(view.begins[0, head].tolist(), view.sizes[0, head].tolist(), strict=True)):
        groups.append(Group(centroids[g], view.members[0, head, begin : begin + size].tolist()))
    return groups


def chunk_means(keys: torch.Tensor, chunk_size: int) -> dict[int, np.ndarray]:
    """Mean key of every whole chunk of keys `[n, D]`, float64."""
    values = as_float64(keys)
    return {c: values[c * chunk_size : (c + 1) * chunk_size].mean(0) for c in range(len(values) // chunk_size)}
