"""A home full of random tokens, larger than any cache, for kernels to read layer after layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang_kvdrive.layout import BLOCK_TOKENS, KVLayout, ceil_div

SMOLLM2 = {"n_layers": 30, "n_q_heads": 9, "n_kv_heads": 3, "head_dim": 64}


@dataclass
class Stored:
    """`n_batch` sequences of `n_tokens` each: home `[blocks, L, H_kv, chunks, 2, C, D]` and its block table."""

    layout: KVLayout
    home: torch.Tensor
    blocks: torch.Tensor
    n_batch: int
    n_tokens: int

    @property
    def layer_bytes(self) -> int:
        """K and V of one layer, all sequences."""
        return self.n_batch * self.n_tokens * self.layout.token_bytes // self.layout.n_layers

    def queries(self) -> torch.Tensor:
        """`[B, H_kv, G, D]`."""
        layout = self.layout
        return torch.randn(self.n_batch, layout.n_kv_heads, layout.q_per_kv, layout.head_dim).to(layout.dtype)


def store(n_batch: int, n_tokens: int, dtype: torch.dtype, chunk_size: int = 2) -> Stored:
    """Random keys and values in blocks that lie in random order."""
    layout = KVLayout(**SMOLLM2, dtype=dtype, chunk_size=chunk_size)
    per_sequence = ceil_div(n_tokens, BLOCK_TOKENS)
    n_blocks = n_batch * per_sequence
    home = torch.empty(layout.home_shape(n_blocks), dtype=dtype).normal_()
    blocks = torch.randperm(n_blocks).view(n_batch, per_sequence)
    return Stored(layout, home, blocks, n_batch, n_tokens)
