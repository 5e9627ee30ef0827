"""Counters of one engine. Plain integers that only grow; rates are derived where they are shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class EngineStats:
    """Everything counted, never inferred. Bytes are counted where they move."""

    decode_steps: int = 0
    decoded_tokens: int = 0
    dense_tokens: int = 0
    """Decoded tokens that attended everything."""
    sparse_tokens: int = 0
    """Decoded tokens that attended a selection."""
    prefill_tokens: int = 0
    attended_entries: int = 0
    """Tokens attended while decoding, summed over layers and KV heads."""
    stored_entries: int = 0
    """Tokens that full attention would have attended, summed likewise."""
    selected_chunks: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    seals: int = 0
    sealed_tokens: int = 0
    seal_us: int = 0
    bytes_home_written: int = 0
    """New K and V written to their home in DRAM."""
    bytes_fetched: int = 0
    """DRAM to HBM: misses of the windows."""
    bytes_placed: int = 0
    """DRAM to HBM: steady zones when a sequence starts to decode."""
    bytes_appended: int = 0
    """New K and V written to the steady zones in HBM."""
    bytes_streamed: int = 0
    """DRAM to the prefill buffer: earlier K and V of a prompt that comes in pieces."""

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    @property
    def hit_rate(self) -> float | None:
        total = self.hits + self.misses
        return self.hits / total if total else None
