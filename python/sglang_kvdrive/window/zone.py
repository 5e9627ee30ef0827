"""Steady zones: the slots of the chunks that are always attended (sink, local, pending; of a dense sequence, all)."""

from __future__ import annotations

import torch

from sglang_kvdrive.errors import IntegrityError
from sglang_kvdrive.layout import KVLayout


class SteadyZones:
    """Slot of every steady chunk, per (layer, sequence, KV head).

    The first `sink_chunks` places belong to the sink chunks, the places after them form a ring:
    chunk c lives at place `sink + (c - sink) % ring`.

    Args:
        layout: geometry.
        n_sequences: sequence ids run from 0 to n_sequences - 1.
        max_places: places of the largest zone.
        sink_chunks: chunks that never leave.
    """

    def __init__(self, layout: KVLayout, *, n_sequences: int, max_places: int, sink_chunks: int):
        self.layout = layout
        self.sink_chunks = sink_chunks
        self._slots = torch.empty(layout.n_layers, n_sequences, layout.n_kv_heads, max_places, dtype=torch.int32)
        self.n_places = torch.zeros(n_sequences, dtype=torch.int64)
        self._ring = torch.ones(n_sequences, dtype=torch.int64)

    @property
    def books_bytes(self) -> int:
        return self._slots.numel() * self._slots.element_size()

    def grow(self, seq_id: int, slots: torch.Tensor) -> None:
        """Add places. Only a zone that has not wrapped yet may grow. `slots`: `[n * L * H_kv]` int32."""
        layout = self.layout
        first = int(self.n_places[seq_id])
        n = slots.numel() // layout.n_pairs
        self._slots[:, seq_id, :, first : first + n] = slots.view(layout.n_layers, layout.n_kv_heads, n)
        self.n_places[seq_id] = first + n
        self._ring[seq_id] = max(1, first + n - self.sink_chunks)

    def places(self, seq_ids: torch.Tensor, chunk_ids: torch.Tensor) -> torch.Tensor:
        """Place of steady chunks. seq_ids `[B]`, chunk_ids `[B, n]` int64, returns `[B, n]` int64."""
        sink = self.sink_chunks
        ring = self._ring[seq_ids].unsqueeze(1)
        return torch.where(chunk_ids < sink, chunk_ids, sink + (chunk_ids - sink) % ring)

    def slots_at(self, seq_ids: torch.Tensor, chunk_ids: torch.Tensor) -> torch.Tensor:
        """Slots of steady chunks over all layers: `[L, B, H_kv, n]` int32 for seq_ids `[B]`, chunk_ids `[B, n]`."""
        places = self.places(seq_ids, chunk_ids)
        return self._slots[:, seq_ids.unsqueeze(1), :, places].permute(2, 0, 3, 1)

    def slots_of(self, seq_id: int) -> torch.Tensor:
        """HBM slots of a sequence's zone, int32."""
        return self._slots[:, seq_id, :, : int(self.n_places[seq_id])].reshape(-1)

    def release(self, seq_id: int) -> torch.Tensor:
        """Forget a sequence. Returns the HBM slots of its zone, int32."""
        slots = self.slots_of(seq_id)
        self.n_places[seq_id] = 0
        self._ring[seq_id] = 1
        return slots

    def check_integrity(self) -> None:
        """No slot serves two places of a sequence.

        Raises:
            IntegrityError: one does.
        """
        for seq_id in self.n_places.nonzero().flatten().tolist():
            slots = self.slots_of(seq_id)
            if torch.unique(slots).numel() != slots.numel():
                raise IntegrityError(f"the steady zone of sequence {seq_id} shares a slot")
