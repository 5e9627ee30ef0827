"""The HBM tier: one arena of equal slots, each one chunk of one (layer, KV head).

Steady zones, windows and centroids all live in slots of this arena, so any split between them is possible and nothing
fragments. The tier knows who holds a slot, not what is in it.
"""

from __future__ import annotations

import torch

from sglang_kvdrive.device import CpuDevice
from sglang_kvdrive.errors import CapacityError, IntegrityError
from sglang_kvdrive.layout import KVLayout

FREE = -1


class HbmTier:
    """Slots `[S, 2, C, D]` behind a stack of free ids.

    Args:
        layout: geometry.
        n_slots: S.
        device: where the arena lives.
    """

    def __init__(self, layout: KVLayout, n_slots: int, device: CpuDevice):
        self.layout = layout
        self.n_slots = n_slots
        self.arena = device.allocate_hbm(layout.arena_shape(n_slots), layout.dtype)
        self._free = torch.arange(n_slots - 1, -1, -1, dtype=torch.int32)
        self._n_free = n_slots
        self._holder = torch.full((n_slots,), FREE, dtype=torch.int32)

    @property
    def n_free(self) -> int:
        return self._n_free

    @property
    def n_used(self) -> int:
        return self.n_slots - self._n_free

    @property
    def used_bytes(self) -> int:
        return self.n_used * self.layout.slot_bytes

    @property
    def total_bytes(self) -> int:
        return self.n_slots * self.layout.slot_bytes

    def allocate(self, n: int, seq_id: int) -> torch.Tensor:
        """Take `n` slots for a sequence.

        Returns:
            `[n]` int32 slot ids, contents undefined.

        Raises:
            CapacityError: fewer than `n` are free; nothing was taken.
        """
        if n > self._n_free:
            raise CapacityError(f"the HBM arena has {self._n_free} of {self.n_slots} slots free, {n} are needed")
        slots = self._free[self._n_free - n : self._n_free].clone()
        self._n_free -= n
        self._holder[slots.long()] = seq_id
        return slots

    def release(self, slots: torch.Tensor, seq_id: int) -> None:
        """Give slots back.

        Raises:
            IntegrityError: a slot is not held by this sequence (double free, foreign slot) or is named twice; nothing
                was released.
        """
        slots = slots.reshape(-1)
        exists = (slots >= 0) & (slots < self.n_slots)
        wrong = ~exists | (self._holder[slots.long() * exists] != seq_id)
        if bool(wrong.any()):
            raise IntegrityError(f"sequence {seq_id} releases {int(wrong.sum())} HBM slots that it does not hold")
        if torch.unique(slots).numel() != slots.numel():
            raise IntegrityError(f"sequence {seq_id} releases an HBM slot twice")
        n = slots.numel()
        self._holder[slots.long()] = FREE
        self._free[self._n_free : self._n_free + n] = slots.int()
        self._n_free += n

    def n_held(self, seq_id: int) -> int:
        return int((self._holder == seq_id).sum())

    def check_integrity(self) -> None:
        """Free and held slots are disjoint and together all slots.

        Raises:
            IntegrityError: they are not.
        """
        free = self._free[: self._n_free].long()
        if torch.unique(free).numel() != self._n_free:
            raise IntegrityError("the HBM free list holds a slot twice")
        if bool((self._holder[free] != FREE).any()):
            raise IntegrityError("the HBM free list holds a slot that a sequence holds")
        n_held = int((self._holder != FREE).sum())
        if n_held + self._n_free != self.n_slots:
            raise IntegrityError(f"HBM: {n_held} held + {self._n_free} free is not {self.n_slots} slots")
