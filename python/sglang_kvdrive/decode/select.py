"""Stage S: score all groups, walk them best first, stop at exactly the budget."""

from __future__ import annotations

import torch
from kvdrive_kernels.select_chunks import select_chunks

from sglang_kvdrive.decode.step import Part
from sglang_kvdrive.index.hierarchy import ChunkIndex
from sglang_kvdrive.sequences import SequenceBook
from sglang_kvdrive.tiers.hbm import HbmTier
from sglang_kvdrive.tiers.transfer import Transfer
from sglang_kvdrive.values import Selection


class Selector:
    """The two-level selector of the paper: group centroids in HBM, the last group cut by the mean keys of its chunks."""

    def __init__(self, book: SequenceBook, index: ChunkIndex, hbm: HbmTier, transfer: Transfer):
        self.book, self.index, self.hbm, self.transfer = book, index, hbm, transfer
        self.layout = transfer.layout

    def select(self, layer: int, part: Part, q: torch.Tensor, scale: float) -> Selection:
        """Choose `part.n_wanted` chunks per KV head.

        Args:
            q: `[b, H_kv, G, D]`.
        """
        chosen = select_chunks(
            q, self.hbm.arena, *self.index.books(layer), self.transfer.home, layer, self.book.blocks,
            part.seq_ids, part.n_wanted, part.shape, scale,
        )  # fmt: skip
        return Selection(*chosen)

    def home_rows(self, layer: int, seq_ids: torch.Tensor, chunk_ids: torch.Tensor) -> torch.Tensor:
        """Home rows of chunks. seq_ids `[b]`, chunk_ids `[b, H_kv, n]`, returns `[b, H_kv, n]` int64."""
        chunk_ids = chunk_ids.long()
        per_block = self.layout.chunks_per_block
        blocks = self.book.blocks[seq_ids.view(-1, 1, 1), chunk_ids // per_block]
        heads = torch.arange(self.layout.n_kv_heads).view(1, -1, 1)
        return self.transfer.home_rows(layer, blocks, heads, chunk_ids % per_block)
