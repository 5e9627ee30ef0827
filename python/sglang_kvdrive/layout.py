"""All shape and byte arithmetic of the KV cache, in one place.

Logical positions are tokens and chunks (C adjacent tokens of one sequence, chunk id = token // C).
Physical places are *blocks* in DRAM (64 tokens, all layers, all heads) and *slots* in HBM (one chunk
of one (layer, KV head): `[2 (K, V), C, D]`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_kvdrive.errors import ConfigError

BLOCK_TOKENS = 64
"""Tokens of one DRAM home block. Equals SGLang's page size whatever the chunk size."""

CHUNK_SIZES = (1, 2, 4, 8)


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def align_up(value: int, unit: int) -> int:
    return ceil_div(value, unit) * unit


@dataclass(frozen=True)
class KVLayout:
    """Geometry of the K and V of one model (of one tensor-parallel rank).

    Args:
        n_layers: L, attention layers.
        n_q_heads: H_q, query heads.
        n_kv_heads: H_kv, KV heads.
        head_dim: D, the same for keys and values.
        dtype: storage dtype of K and V: float32, bfloat16 or float16.
        chunk_size: C, tokens per chunk.

    Raises:
        ConfigError: a shape that the engine cannot store, with every reason.
    """

    n_layers: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    chunk_size: int = 4

    def __post_init__(self) -> None:
        reasons = []
        for name in ("n_layers", "n_q_heads", "n_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                reasons.append(f"{name} is {getattr(self, name)}, it must be at least 1")
        if not reasons and self.n_q_heads % self.n_kv_heads:
            reasons.append(f"{self.n_q_heads} query heads are not a multiple of {self.n_kv_heads} KV heads")
        if self.chunk_size not in CHUNK_SIZES:
            reasons.append(f"chunk size {self.chunk_size} is not one of {', '.join(map(str, CHUNK_SIZES))}")
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            reasons.append(f"KV dtype {self.dtype} is not float32, bfloat16 or float16 (use --kv-cache-dtype auto)")
        if reasons:
            raise ConfigError(reasons)

    @property
    def q_per_kv(self) -> int:
        """G, query heads that share one KV head."""
        return self.n_q_heads // self.n_kv_heads

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def n_pairs(self) -> int:
        """(layer, KV head) pairs."""
        return self.n_layers * self.n_kv_heads

    @property
    def chunks_per_block(self) -> int:
        return BLOCK_TOKENS // self.chunk_size

    @property
    def slot_bytes(self) -> int:
        """Bytes of one chunk of one (layer, KV head), K and V."""
        return 2 * self.chunk_size * self.head_dim * self.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers and KV heads, K and V."""
        return self.n_pairs * 2 * self.head_dim * self.itemsize

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * self.token_bytes

    @property
    def vectors_per_slot(self) -> int:
        """Vectors of D elements in one slot: what one slot holds when it stores centroids."""
        return 2 * self.chunk_size

    def home_shape(self, n_blocks: int) -> tuple[int, ...]:
        """Shape of the DRAM home: `[blocks, L, H_kv, chunks_per_block, 2, C, D]`; one chunk of one head is contiguous."""
        return (n_blocks, self.n_layers, self.n_kv_heads, self.chunks_per_block, 2, self.chunk_size, self.head_dim)

    def arena_shape(self, n_slots: int) -> tuple[int, ...]:
        """Shape of the HBM arena: `[slots, 2, C, D]`."""
        return (n_slots, 2, self.chunk_size, self.head_dim)
