"""The DRAM tier: the home of every token's K and V, in blocks of 64 tokens, all layers, all heads.

Inside a block: `[layer][kv_head][chunk][K, V][C][D]`, so that one chunk of one head is contiguous.
Block 0 is never handed out: SGLang writes padding there.
"""

from __future__ import annotations

import torch

from sglang_kvdrive.device import CpuDevice
from sglang_kvdrive.errors import CapacityError, IntegrityError
from sglang_kvdrive.layout import BLOCK_TOKENS, KVLayout


class DramTier:
    """Home blocks behind one free list; no fragmentation, every allocation is whole blocks.

    Args:
        layout: geometry.
        n_blocks: blocks that can be handed out (ids 1 to n_blocks).
        device: where the memory comes from.
    """

    def __init__(self, layout: KVLayout, n_blocks: int, device: CpuDevice):
        self.layout = layout
        self.n_blocks = n_blocks
        self.home = device.allocate_dram(layout.home_shape(n_blocks + 1), layout.dtype)
        self._free = torch.empty(n_blocks, dtype=torch.int64)
        self._used = torch.zeros(n_blocks + 1, dtype=torch.bool)
        self.clear()

    @property
    def n_free(self) -> int:
        return self._n_free

    @property
    def n_used(self) -> int:
        return self.n_blocks - self._n_free

    @property
    def capacity_tokens(self) -> int:
        return self.n_blocks * BLOCK_TOKENS

    @property
    def used_bytes(self) -> int:
        return self.n_used * self.layout.block_bytes

    @property
    def total_bytes(self) -> int:
        return self.n_blocks * self.layout.block_bytes

    def clear(self) -> None:
        """Forget everything; every block is free again."""
        self._free.copy_(torch.arange(self.n_blocks, 0, -1))
        self._n_free = self.n_blocks
        self._used.zero_()

    def allocate(self, n: int) -> torch.Tensor:
        """Take `n` blocks.

        Returns:
            `[n]` int64 block ids, contents undefined.

        Raises:
            CapacityError: fewer than `n` are free; nothing was taken.
        """
        if n > self._n_free:
            raise CapacityError(
                f"DRAM has {self._n_free * BLOCK_TOKENS} of {self.capacity_tokens} tokens free, {n * BLOCK_TOKENS} are needed"
            )
        blocks = self._free[self._n_free - n : self._n_free].flip(0)
        self._n_free -= n
        self._used[blocks] = True
        return blocks

    def release(self, blocks: torch.Tensor) -> None:
        """Give blocks back.

        Raises:
            IntegrityError: a block is not in use (double free) or is named twice; nothing was released.
        """
        blocks = blocks.reshape(-1).long()
        exists = bool(((blocks > 0) & (blocks <= self.n_blocks)).all())
        if not exists or torch.unique(blocks).numel() != blocks.numel() or not self.is_used(blocks):
            raise IntegrityError("a DRAM block is released that is not in use")
        n = blocks.numel()
        self._used[blocks] = False
        self._free[self._n_free : self._n_free + n] = blocks
        self._n_free += n

    def free_ids(self) -> torch.Tensor:
        """`[n_free]` int64 ids of the free blocks (a copy)."""
        return self._free[: self._n_free].clone()

    def is_used(self, blocks: torch.Tensor) -> bool:
        """Whether all of these blocks are in use."""
        return bool(self._used[blocks.long()].all())

    def check_integrity(self) -> None:
        """Free and used blocks are disjoint and together all blocks.

        Raises:
            IntegrityError: they are not.
        """
        free = self._free[: self._n_free]
        if torch.unique(free).numel() != self._n_free or bool(self._used[free].any()):
            raise IntegrityError("the DRAM free list holds a block twice or one that is in use")
        n_used = int(self._used.sum())
        if n_used + self._n_free != self.n_blocks or bool(self._used[0]):
            raise IntegrityError(f"DRAM: {n_used} used + {self._n_free} free is not {self.n_blocks} blocks")
