"""The only hand that moves bytes between tiers. It counts what it moves.

A *home row* is the place of one chunk of one (layer, KV head) in DRAM, counted through all blocks:
`((block * L + layer) * H_kv + head) * chunks_per_block + chunk_in_block`.
"""

from __future__ import annotations

import torch
from kvdrive_kernels.gather_chunks import gather_chunks

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
        self._home = dram.home
        self._arena = hbm.arena
        elements = 2 * self.layout.chunk_size * self.layout.head_dim
        self._home_rows = dram.home.view(-1, elements)
        self._slots = hbm.arena.view(-1, elements)

    def home_rows(
        self, layer: int | torch.Tensor, blocks: torch.Tensor, heads: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        """Home rows of chunks; all arguments broadcast. `places` are chunk positions within their block."""
        layout = self.layout
        return ((blocks * layout.n_layers + layer) * layout.n_kv_heads + heads) * layout.chunks_per_block + places

    def write_home(self, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write new tokens to their home.

        Args:
            blocks, offsets: `[T]` int64, block and token position within it.
            k, v: `[T, H_kv, D]`.
        """
        chunk_size = self.layout.chunk_size
        places, inside = offsets // chunk_size, offsets % chunk_size
        of_layer = self._home[:, layer].transpose(1, 2)  # [blocks, chunks, H_kv, 2, C, D]
        of_layer[blocks, places, :, 0, inside] = k
        of_layer[blocks, places, :, 1, inside] = v
        self.stats.bytes_home_written += 2 * k.numel() * k.element_size()

    def append(self, slots: torch.Tensor, inside: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the newest token of each sequence to its steady zone.

        Args:
            slots: `[B, H_kv]` int64, slot of the chunk that the token belongs to.
            inside: `[B]` int64, position of the token within its chunk.
            k, v: `[B, H_kv, D]`.
        """
        at = inside.unsqueeze(1)
        self._arena[slots, 0, at] = k
        self._arena[slots, 1, at] = v
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

    def stream_blocks(self, layer: int, blocks: torch.Tensor, n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of whole blocks of one layer, in token order, for prefill.

        Args:
            blocks: `[N]` int64.
            n_tokens: tokens wanted, at most 64 N.

        Returns:
            keys, values `[H_kv, n_tokens, D]`.
        """
        layout = self.layout
        chunks = self._home[blocks, layer].transpose(0, 1)  # [H_kv, N, chunks, 2, C, D]
        keys = chunks[:, :, :, 0].reshape(layout.n_kv_heads, -1, layout.head_dim)[:, :n_tokens]
        values = chunks[:, :, :, 1].reshape(layout.n_kv_heads, -1, layout.head_dim)[:, :n_tokens]
        self.stats.bytes_streamed += 2 * keys.numel() * layout.itemsize
        return keys, values

    def store_vectors(self, slots: torch.Tensor, vectors: torch.Tensor) -> None:
        """Store centroids in slots. slots `[..., n]` int64, vectors `[..., n * vectors_per_slot, D]`."""
        layout = self.layout
        self._slots[slots.reshape(-1)] = vectors.to(layout.dtype).reshape(-1, self._slots.shape[1])

    def load_vectors(self, slots: torch.Tensor) -> torch.Tensor:
        """Centroids stored in slots. slots `[..., n]` int64, returns `[..., n * vectors_per_slot, D]`."""
        found = self._slots.index_select(0, slots.reshape(-1))
        return found.view(*slots.shape[:-1], slots.shape[-1] * self.layout.vectors_per_slot, self.layout.head_dim)
