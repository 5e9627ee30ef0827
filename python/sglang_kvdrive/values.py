"""Small frozen values that pass from room to room. Nobody gets a reference to another room's books."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class Mode(enum.IntEnum):
    """Where a sequence is in its life."""

    FREE = 0
    PREFILL = 1
    DENSE = 2  # decodes with everything attended, no index
    SPARSE = 3  # decodes over sink + selected + local


@dataclass(frozen=True)
class Selection:
    """What one layer wants to attend this step (stage S).

    Attributes:
        chunk_ids: `[B, H_kv, K]` int32, ranked best first, -1 padded.
        group_ids: `[B, H_kv, K]` int32, the group each chunk came from.
        group_scores: `[B, H_kv, N_g]` fp32, the current score of every group: lookahead eviction needs them all.
    """

    chunk_ids: torch.Tensor
    group_ids: torch.Tensor
    group_scores: torch.Tensor


@dataclass(frozen=True)
class Lookup:
    """Where the selected chunks are or will be in HBM (stage H).

    Attributes:
        slot_ids: `[B, H_kv, K]` int32, HBM slot of each selected chunk, 0 where padded.
        misses: `[B, H_kv, K]` bool, chunks whose slot must be filled before they are attended.
        n_hits, n_misses, n_evictions: `[B]` int64, over the heads.
    """

    slot_ids: torch.Tensor
    misses: torch.Tensor
    n_hits: torch.Tensor
    n_misses: torch.Tensor
    n_evictions: torch.Tensor


@dataclass(frozen=True)
class SequenceStats:
    """What one sequence did while decoding, summed over layers and KV heads.

    `attended` and `stored` count tokens, summed over steps, layers and KV heads.
    """

    mode: str
    budget_entries: int
    steps: int
    hits: int
    misses: int
    attended: int
    stored: int

    @property
    def hit_rate(self) -> float | None:
        total = self.hits + self.misses
        return self.hits / total if total else None
