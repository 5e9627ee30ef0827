"""Stage S: score all groups, walk them best first, stop at exactly the budget."""

from __future__ import annotations

import torch
from kvdrive_kernels.fill_chunks import fill_chunks
from kvdrive_kernels.mean_keys import mean_keys
from kvdrive_kernels.score_groups import score_groups

from sglang_kvdrive.decode.step import Part
from sglang_kvdrive.index.hierarchy import ChunkIndex
from sglang_kvdrive.sequences import SequenceBook
from sglang_kvdrive.tiers.transfer import Transfer
from sglang_kvdrive.values import Selection


class Selector:
    """The two-level selector of the paper: group centroids in HBM, the last group cut by the mean keys of its chunks."""

    def __init__(self, book: SequenceBook, index: ChunkIndex, transfer: Transfer):
        self.book, self.index, self.transfer = book, index, transfer
        self.layout = transfer.layout

    def select(self, layer: int, part: Part, q: torch.Tensor, scale: float) -> Selection:
        """Choose `part.n_wanted` chunks per KV head.

        Args:
            q: `[b, H_kv, G, D]`.
        """
        view = self.index.view(layer, part.pages, part.present)
        centroids = self._load_centroids(view.centroid_slots)
        scores, lse = score_groups(q, centroids, view.sizes, scale)

        def chunk_scores(candidates: torch.Tensor) -> torch.Tensor:
            """Like a group's score, with the chunk's own mean key, in the log so that nothing overflows."""
            keys = self.transfer.read_keys(self.home_rows(layer, part.seq_ids, candidates.clamp_min(0)))
            logits = torch.einsum("bhgd,bhxd->bhgx", q.float(), mean_keys(keys)) * scale
            return torch.logsumexp(logits - lse.unsqueeze(-1), dim=2)

        chunk_ids, group_ids = fill_chunks(scores, view.begins, view.sizes, view.members, part.n_wanted, chunk_scores)
        return Selection(chunk_ids, group_ids, scores)

    def home_rows(self, layer: int, seq_ids: torch.Tensor, chunk_ids: torch.Tensor) -> torch.Tensor:
        """Home rows of chunks. seq_ids `[b]`, chunk_ids `[b, H_kv, n]`, returns `[b, H_kv, n]` int64."""
        chunk_ids = chunk_ids.long()
        per_block = self.layout.chunks_per_block
        blocks = self.book.blocks[seq_ids.view(-1, 1, 1), chunk_ids // per_block]
        heads = torch.arange(self.layout.n_kv_heads).view(1, -1, 1)
        return self.transfer.home_rows(layer, blocks, heads, chunk_ids % per_block)

    def _load_centroids(self, slots: torch.Tensor) -> torch.Tensor:
        """`[b, H_kv, N_g, D]`: a page's slots may have room for more vectors than the page has groups."""
        per_page, slots_per_page = self.index.config.groups_per_page, self.index.slots_per_page
        vectors = self.transfer.load_vectors(slots)
        by_page = vectors.view(*slots.shape[:2], -1, slots_per_page * self.layout.vectors_per_slot, self.layout.head_dim)
        return by_page[..., :per_page, :].flatten(2, 3)
