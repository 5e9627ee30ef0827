"""Windows: which chunks of each (sequence, layer, KV head) are resident in HBM, and which give way."""

from __future__ import annotations

import torch
from kvdrive_kernels.probe_books import probe_books

from sglang_kvdrive.errors import IntegrityError
from sglang_kvdrive.layout import KVLayout
from sglang_kvdrive.values import Lookup, Selection
from sglang_kvdrive.window.eviction import eviction_policy

EMPTY = -1


class Windows:
    """The books of every window: entry -> slot, chunk, group, age.

    A window has `n_entries[seq]` entries, each with one HBM slot that stays its own until the sequence ends; chunks come
    and go. Evicting a chunk forgets it: its home copy lies below.

    Args:
        layout: geometry.
        n_sequences: sequence ids run from 0 to n_sequences - 1.
        max_entries: W, entries of the largest window.
        eviction: lookahead, lru or fifo.
    """

    def __init__(self, layout: KVLayout, *, n_sequences: int, max_entries: int, eviction: str):
        self.layout = layout
        self.max_entries = max(1, max_entries)
        self.policy = eviction_policy(eviction)
        shape = (layout.n_layers, n_sequences, layout.n_kv_heads, self.max_entries)
        self._slots = torch.empty(shape, dtype=torch.int32)
        self._chunks = torch.empty(shape, dtype=torch.int32)
        self._groups = torch.empty(shape, dtype=torch.int32)
        self._stamps = torch.empty(shape, dtype=torch.int64)
        self.n_entries = torch.zeros(n_sequences, dtype=torch.int64)
        self._clock = 0

    @property
    def books_bytes(self) -> int:
        """Address space of the books; memory is committed as sequences use it."""
        return sum(t.numel() * t.element_size() for t in (self._slots, self._chunks, self._groups, self._stamps))

    def grow(self, seq_id: int, slots: torch.Tensor) -> None:
        """Add empty entries to every window of a sequence. `slots`: `[n * L * H_kv]` int32."""
        layout = self.layout
        first = int(self.n_entries[seq_id])
        if first == 0:  # entries beyond the window are never used, but they are sorted along with the others
            self._slots[:, seq_id], self._chunks[:, seq_id], self._groups[:, seq_id], self._stamps[:, seq_id] = 0, EMPTY, 0, 0
        n = slots.numel() // layout.n_pairs
        self._slots[:, seq_id, :, first : first + n] = slots.view(layout.n_layers, layout.n_kv_heads, n)
        self.n_entries[seq_id] = first + n

    def tick(self) -> None:
        """A new step begins: what is used from now on is younger."""
        self._clock += self.max_entries

    def probe(self, layer: int, seq_ids: torch.Tensor, selection: Selection) -> Lookup:
        """Hits, misses and victims of one layer, and enter the result: after this call every selected chunk is resident
        in the books, though the slots of the misses still have to be filled.

        Args:
            seq_ids: `[B]` int64.
            selection: at most `n_entries` chunks per head.
        """
        books = (self._chunks[layer], self._groups[layer], self._stamps[layer], self._slots[layer], self.n_entries)
        slot_ids, misses, counts = probe_books(
            *books, seq_ids, selection.chunk_ids, selection.group_ids, selection.group_scores, self._clock,
            by_score=self.policy.by_score, stamps_hits=self.policy.stamps_hits,
        )  # fmt: skip
        return Lookup(slot_ids, misses, *counts.unbind(1))

    def slots_of(self, seq_id: int) -> torch.Tensor:
        """HBM slots of a sequence's windows, int32."""
        return self._slots[:, seq_id, :, : int(self.n_entries[seq_id])].reshape(-1)

    def release(self, seq_id: int) -> torch.Tensor:
        """Forget a sequence. Returns the HBM slots of its windows, int32."""
        slots = self.slots_of(seq_id)
        self.n_entries[seq_id] = 0
        return slots

    def residents(self, layer: int, seq_id: int, head: int) -> torch.Tensor:
        """Chunk ids in one window, int32, in no order."""
        chunks = self._chunks[layer, seq_id, head, : int(self.n_entries[seq_id])]
        return chunks[chunks != EMPTY]

    def check_integrity(self) -> None:
        """No chunk is resident twice in a window; no slot serves two entries of a sequence.

        Raises:
            IntegrityError: one does.
        """
        for seq_id in self.n_entries.nonzero().flatten().tolist():
            n = int(self.n_entries[seq_id])
            chunks = self._chunks[:, seq_id, :, :n].flatten(0, 1).sort(dim=-1).values
            if bool(((chunks[:, 1:] == chunks[:, :-1]) & (chunks[:, 1:] != EMPTY)).any()):
                raise IntegrityError(f"a window of sequence {seq_id} holds a chunk twice")
            slots = self.slots_of(seq_id)
            if torch.unique(slots).numel() != slots.numel():
                raise IntegrityError(f"the windows of sequence {seq_id} share a slot")
