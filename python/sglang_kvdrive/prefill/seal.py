"""Sealing: tokens that leave the steady zone get their index, once, segment by segment."""

from __future__ import annotations

import time

import torch

from sglang_kvdrive.config import KVDriveConfig
from sglang_kvdrive.index.grouping import group_segment
from sglang_kvdrive.index.hierarchy import ChunkIndex
from sglang_kvdrive.layout import KVLayout
from sglang_kvdrive.sequences import SequenceBook
from sglang_kvdrive.tiers.hbm import HbmTier
from sglang_kvdrive.tiers.transfer import Transfer


class Sealer:
    """Builds the index of one segment after the other.

    Segment borders depend on the tokens alone, never on prefill pieces or tiers: `segment_tokens` from the end of the
    sink on, and what is left at the end of the prompt.
    """

    def __init__(
        self, layout: KVLayout, config: KVDriveConfig, book: SequenceBook, index: ChunkIndex, hbm: HbmTier, transfer: Transfer
    ):
        self.layout, self.config = layout, config
        self.book, self.index, self.hbm, self.transfer = book, index, hbm, transfer

    def seal_prompt(self, seq_id: int) -> None:
        """Index everything up to the local zone (`config.sealed_end`)."""
        end = self.config.sealed_end(int(self.book.n_tokens[seq_id]))
        begin = self.config.sink_chunks * self.layout.chunk_size
        for start in range(begin, end, self.config.segment_tokens):
            self.seal(seq_id, start, min(end, start + self.config.segment_tokens))
        self.book.sealed_end[seq_id] = max(begin, end)

    def seal(self, seq_id: int, begin: int, end: int) -> None:
        """Index the tokens [begin, end), whole chunks.

        Raises:
            CapacityError: no index page or HBM slot is left.
        """
        started = time.perf_counter()
        chunk_size = self.layout.chunk_size
        first_chunk, n_chunks = begin // chunk_size, (end - begin) // chunk_size
        n_slots = self.index.pages_for(n_chunks) * self.index.slots_per_page * self.layout.n_pairs
        positions = self.index.open_segment(seq_id, n_chunks, self.hbm.allocate(n_slots, seq_id))
        rows = self._home_rows(seq_id, first_chunk, n_chunks)
        for layer in range(self.layout.n_layers):
            keys = self.transfer.read_keys(rows + layer * self.layout.n_kv_heads * self.layout.chunks_per_block)
            groups = group_segment(keys, self.config.tokens_per_group, self.config.kmeans_iterations)
            slots = self.index.write_segment(seq_id, layer, positions, first_chunk, groups)
            centroids = self._page_vectors(groups.centroids, len(positions))
            self.transfer.store_vectors(slots, centroids)
        self.book.sealed_end[seq_id] = end
        stats = self.transfer.stats
        stats.seals += 1
        stats.sealed_tokens += end - begin
        stats.seal_us += round((time.perf_counter() - started) * 1e6)

    def _home_rows(self, seq_id: int, first_chunk: int, n_chunks: int) -> torch.Tensor:
        """`[H_kv, n_chunks]` home rows of the chunks at layer 0."""
        chunk_ids = torch.arange(first_chunk, first_chunk + n_chunks)
        per_block = self.layout.chunks_per_block
        blocks = self.book.blocks[seq_id, chunk_ids // per_block]
        heads = torch.arange(self.layout.n_kv_heads).unsqueeze(1)
        return self.transfer.home_rows(0, blocks, heads, chunk_ids % per_block)

    def _page_vectors(self, centroids: torch.Tensor, n_pages: int) -> torch.Tensor:
        """Spread centroids `[H_kv, N_g, D]` over the slots of their pages: `[H_kv, n, D]`, zero where there is none."""
        n_heads, n_groups, dim = centroids.shape
        per_page = self.config.groups_per_page
        page_vectors = self.index.slots_per_page * self.layout.vectors_per_slot
        by_page = torch.nn.functional.pad(centroids, (0, 0, 0, n_pages * per_page - n_groups)).view(
            n_heads, n_pages, per_page, dim
        )
        return torch.nn.functional.pad(by_page, (0, 0, 0, page_vectors - per_page)).flatten(1, 2)
