"""ChunkIndex: the books of the two-level index, in pages.

A *page* holds `groups_per_page` groups of one sequence, for every layer and KV head: where their members are listed,
how many there are, and which HBM slots hold their centroids. A segment is sealed into whole pages of its own and is
never changed afterwards, so a sequence's index only grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_kvdrive.config import KVDriveConfig
from sglang_kvdrive.errors import CapacityError, IntegrityError
from sglang_kvdrive.index.grouping import Groups
from sglang_kvdrive.layout import KVLayout, ceil_div


@dataclass(frozen=True)
class IndexView:
    """The groups of several sequences at one layer, padded to the longest (empty groups have size 0).

    Attributes:
        centroid_slots: `[B, H_kv, n]` int64, HBM slots that hold the centroids, group after group.
        begins, sizes: `[B, H_kv, N_g]` int32.
        members: `[B, H_kv, M]` int32, chunk ids.
    """

    centroid_slots: torch.Tensor
    begins: torch.Tensor
    sizes: torch.Tensor
    members: torch.Tensor


class ChunkIndex:
    """Groups of every indexed sequence.

    Args:
        layout, config: geometry and index settings.
        n_sequences: sequence ids run from 0 to n_sequences - 1.
        max_tokens: longest sequence.
        n_pages: pages over all sequences.
    """

    def __init__(self, layout: KVLayout, config: KVDriveConfig, *, n_sequences: int, max_tokens: int, n_pages: int):
        self.layout, self.config = layout, config
        per_page, heads = config.groups_per_page, (layout.n_layers, n_pages, layout.n_kv_heads)
        self.members_per_page = config.page_tokens // layout.chunk_size
        self.slots_per_page = ceil_div(per_page, layout.vectors_per_slot)
        self._slots = torch.empty(*heads, self.slots_per_page, dtype=torch.int32)
        self._begins = torch.empty(*heads, per_page, dtype=torch.int32)
        self._sizes = torch.empty(*heads, per_page, dtype=torch.int32)
        self._members = torch.empty(*heads, self.members_per_page, dtype=torch.int32)
        self._page_table = torch.zeros(n_sequences, max(1, config.n_index_pages(max_tokens)), dtype=torch.int64)
        self.n_pages = torch.zeros(n_sequences, dtype=torch.int64)
        self.n_chunks = torch.zeros(n_sequences, dtype=torch.int64)
        """Indexed chunks of each sequence."""
        self._free = list(range(n_pages - 1, -1, -1))
        self._n_total = n_pages

    @property
    def books_bytes(self) -> int:
        """Memory of the books, beside the centroids in the arena."""
        return sum(t.numel() * t.element_size() for t in (self._slots, self._begins, self._sizes, self._members))

    def pages_for(self, n_chunks: int) -> int:
        """Pages that a segment of `n_chunks` takes."""
        return ceil_div(n_chunks * self.layout.chunk_size, self.config.page_tokens)

    def open_segment(self, seq_id: int, n_chunks: int, slots: torch.Tensor) -> range:
        """Take pages for a new segment and note which slots will hold its centroids.

        Args:
            slots: `[pages * slots_per_page * L * H_kv]` int32 HBM slots.

        Returns:
            page positions of the segment within the sequence.

        Raises:
            CapacityError: no page is left; nothing was taken.
        """
        n_pages = self.pages_for(n_chunks)
        if n_pages > len(self._free):
            raise CapacityError(f"the index has {len(self._free)} of {self._n_total} pages free, {n_pages} are needed")
        pages = torch.tensor([self._free.pop() for _ in range(n_pages)], dtype=torch.int64)
        first = int(self.n_pages[seq_id])
        self._page_table[seq_id, first : first + n_pages] = pages
        layout = self.layout
        self._slots[:, pages] = slots.view(layout.n_layers, n_pages, layout.n_kv_heads, self.slots_per_page)
        self.n_pages[seq_id] += n_pages
        self.n_chunks[seq_id] += n_chunks
        return range(first, first + n_pages)

    def write_segment(self, seq_id: int, layer: int, positions: range, first_chunk: int, groups: Groups) -> torch.Tensor:
        """Enter the groups of one layer into the pages of an open segment.

        Args:
            positions: what `open_segment` returned.
            first_chunk: chunk id of the segment's first chunk.

        Returns:
            `[H_kv, pages * slots_per_page]` int64: the slots that the padded centroids belong into, in order.
        """
        pages = self._page_table[seq_id, positions.start : positions.stop]
        n_heads, n_groups = groups.sizes.shape
        n_pages, per_page = len(positions), self.config.groups_per_page
        sizes = groups.sizes.new_zeros(n_heads, n_pages * per_page)
        sizes[:, :n_groups] = groups.sizes
        begins = sizes.cumsum(-1) - sizes + positions.start * self.members_per_page
        members = groups.members.new_full((n_heads, n_pages * self.members_per_page), -1)
        members[:, : groups.members.shape[1]] = groups.members + first_chunk
        for pool, values in ((self._sizes, sizes), (self._begins, begins), (self._members, members)):
            pool[layer, pages] = values.view(n_heads, n_pages, -1).transpose(0, 1).int()
        return self._slots[layer, pages].transpose(0, 1).reshape(n_heads, -1).long()

    def pages_of(self, seq_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages of several sequences, padded to the most.

        Returns:
            pages `[B, P]` int64 (0 where padded), present `[B, P]` bool.
        """
        counts = self.n_pages[seq_ids]
        width = int(counts.max())
        return self._page_table[seq_ids, :width], torch.arange(width) < counts.unsqueeze(1)

    def books(self, layer: int) -> tuple[torch.Tensor, ...]:
        """What `select_chunks` reads: slots, begins, sizes, members of one layer by page, the pages and their number by
        sequence. To read only."""
        return *(pool[layer] for pool in (self._slots, self._begins, self._sizes, self._members)), self._page_table, self.n_pages

    def view(self, layer: int, pages: torch.Tensor, present: torch.Tensor) -> IndexView:
        """The groups of one layer of the sequences whose pages are given (`pages_of`)."""

        def heads_first(pool: torch.Tensor) -> torch.Tensor:
            return pool[layer][pages].transpose(1, 2).flatten(2)

        sizes = self._sizes[layer][pages] * present[:, :, None, None]
        return IndexView(
            heads_first(self._slots).long(),
            heads_first(self._begins),
            sizes.transpose(1, 2).flatten(2),
            heads_first(self._members),
        )

    def release(self, seq_id: int) -> torch.Tensor:
        """Forget a sequence. Returns the HBM slots of its centroids, int32."""
        n_pages = int(self.n_pages[seq_id])
        pages = self._page_table[seq_id, :n_pages]
        slots = self._slots[:, pages].reshape(-1)
        self._free.extend(pages.flip(0).tolist())
        self._page_table[seq_id, :n_pages] = 0
        self.n_pages[seq_id] = 0
        self.n_chunks[seq_id] = 0
        return slots

    def slots_of(self, seq_id: int) -> torch.Tensor:
        """HBM slots of a sequence's centroids, int32."""
        return self._slots[:, self._page_table[seq_id, : int(self.n_pages[seq_id])]].reshape(-1)

    def check_integrity(self) -> None:
        """Every page is free or belongs to one sequence; every indexed chunk is a member of exactly one group.

        Raises:
            IntegrityError: they do not balance.
        """
        used = torch.cat([self._page_table[s, :n] for s, n in enumerate(self.n_pages.tolist()) if n] or [torch.empty(0).long()])
        pages = torch.cat([used, torch.tensor(self._free, dtype=torch.int64)])
        if pages.numel() != self._n_total or torch.unique(pages).numel() != self._n_total:
            raise IntegrityError(f"index pages: {used.numel()} used + {len(self._free)} free is not {self._n_total}")
        for seq_id in self.n_pages.nonzero().flatten().tolist():
            pages = self._page_table[seq_id, : int(self.n_pages[seq_id])]
            expected = int(self.n_chunks[seq_id])
            members = self._members[:, pages].transpose(1, 2).flatten(2).sort(dim=-1, descending=True).values  # [L, H_kv, M]
            n_members = (members >= 0).sum(-1)
            distinct = members[..., 1:expected] != members[..., : expected - 1]
            if not bool((n_members == expected).all()) or not bool(distinct.all()):
                raise IntegrityError(f"sequence {seq_id} has {expected} indexed chunks, its groups hold others or one twice")
            if not bool((self._sizes[:, pages].sum((1, 3)) == expected).all()):
                raise IntegrityError(f"sequence {seq_id} has {expected} indexed chunks, its group sizes sum to another number")
