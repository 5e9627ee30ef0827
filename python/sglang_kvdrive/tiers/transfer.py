"""The only hand that moves bytes between tiers. It counts what it moves.

A *home row* is the place of one chunk of one (layer, KV head) in DRAM, counted through all blocks:
`((block * L + layer) * H_kv + head) * chunks_per_block + chunk_in_block`.
"""

from __future__ import annotations

import torch
from kvdrive_kernels.gather_chunks import gather_chunks
from kvdrive_kernels.store_tokens import store_tokens

from sglang_kvdrive.layout import KVLayout
from sglang_kvdrive.stats import EngineStats
from sglang_kvdrive.tiers.dram import DramTier
from sglang_kvdrive.tiers.hbm import HbmTier


class Transfer:
    """Copies between home (DRAM) and arena (HBM), and writes of new tokens to both.

    Args:
        hbm, dram: the tiers.
        stats: counters to feed.
    """

    def __init__(self, hbm: HbmTier, dram: DramTier, stats: EngineStats):
        self.layout: KVLayout = dram.layout
        self.stats = stats
        self.home = dram.home
        """For kernels that read K and V where they lie."""
        self._arena = hbm.arena
        self._home_chunks = dram.home.view(-1, *hbm.arena.shape[1:])
        elements = 2 * self.layout.chunk_size * self.layout.head_dim
        self._home_rows = dram.home.view(-1, elements)
        self._slots = hbm.arena.view(-1, elements)

    def home_rows(
        self, layer: int | torch.Tensor, blocks: torch.Tensor, heads: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        """Home rows of chunks; all arguments broadcast. `places` are chunk positions within their block."""
        layout = self.layout
        return ((blocks * layout.n_layers + layer) * layout.n_kv_heads + heads) * layout.chunks_per_block + places

    def home_places(self, blocks: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where tokens go at home, the same for every layer.

        Args:
            blocks, offsets: `[T]` int64, block and token position within it.

        Returns:
            rows `[T, H_kv]` int64, home rows of layer 0; inside `[T]` int64, position within the chunk.
        """
        places = (offsets // self.layout.chunk_size).unsqueeze(1)
        rows = self.home_rows(0, blocks.unsqueeze(1), torch.arange(self.layout.n_kv_heads), places)
        return rows, offsets % self.layout.chunk_size

    def write_home(self, layer: int, rows: torch.Tensor, inside: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write new tokens to their home.

        Args:
            rows, inside: from `home_places`.
            k, v: `[T, H_kv, D]`.
        """
        store_tokens(self._home_chunks, rows, layer * self.layout.n_kv_heads * self.layout.chunks_per_block, inside, k, v)
        self.stats.bytes_home_written += 2 * k.numel() * k.element_size()

    def append(self, slots: torch.Tensor, inside: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the newest token of each sequence to its steady zone.

        Args:
            slots: `[B, H_kv]` int64, slot of the chunk that the token belongs to.
            inside: `[B]` int64, position of the token within its chunk.
            k, v: `[B, H_kv, D]`.
        """
        store_tokens(self._arena, slots, 0, inside, k, v)
        self.stats.bytes_appended += 2 * k.numel() * k.element_size()

    def fetch(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Fill window slots from home (DRAM to HBM). `rows`, `slots`: `[M]` int64."""
        gather_chunks(self._home_rows, rows, self._slots, slots)
        self.stats.bytes_fetched += rows.numel() * self.layout.slot_bytes

    def place(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Fill steady-zone slots from home (DRAM to HBM). `rows`, `slots`: `[M]` int64."""
        gather_chunks(self._home_rows, rows, self._slots, slots)
        self.stats.bytes_placed += rows.numel() * self.layout.slot_bytes

    def read_keys(self, rows: torch.Tensor) -> torch.Tensor:
        """Keys of chunks at home. `rows`: any shape, int64. Returns `[*rows.shape, C, D]`."""
        half = self._home_rows.shape[1] // 2
        keys = self._home_rows.view(-1, 2, half)[:, 0].index_select(0, rows.reshape(-1))
        return keys.view(*rows.shape, self.layout.chunk_size, self.layout.head_dim)

    def count_streamed(self, n_tokens: int) -> None:
        """Note that a prefill pass reads K and V of earlier tokens of one layer at home."""
        self.stats.bytes_streamed += n_tokens * self.layout.token_bytes // self.layout.n_layers

    def store_vectors(self, slots: torch.Tensor, vectors: torch.Tensor) -> None:
        """Store centroids in slots. slots `[..., n]` int64, vectors `[..., n * vectors_per_slot, D]`."""
        layout = self.layout
        self._slots[slots.reshape(-1)] = vectors.to(layout.dtype).reshape(-1, self._slots.shape[1])

    def load_vectors(self, slots: torch.Tensor) -> torch.Tensor:
        """Centroids stored in slots. slots `[..., n]` int64, returns `[..., n * vectors_per_slot, D]`."""
        found = self._slots.index_select(0, slots.reshape(-1))
        return found.view(*slots.shape[:-1], slots.shape[-1] * self.layout.vectors_per_slot, self.layout.head_dim)
