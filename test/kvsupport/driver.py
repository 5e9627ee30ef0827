"""Drive an engine without a model: K, V and Q of every token are drawn beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang_kvdrive.config import Budget, KVDriveConfig
from sglang_kvdrive.engine import KVDriveEngine
from sglang_kvdrive.layout import KVLayout, ceil_div

from kvsupport.full_attention import full_attention

EXACT = 2e-6
"""Largest error of an exact fp32 path against float64, for values of unit size."""


def make_layout(
    *, layers: int = 2, kv_heads: int = 2, q_per_kv: int = 2, head_dim: int = 16, dtype=torch.float32, chunk_size: int = 4
) -> KVLayout:
    return KVLayout(layers, kv_heads * q_per_kv, kv_heads, head_dim, dtype, chunk_size)


def make_config(
    layout: KVLayout, *, budget: str = "100%", floor: int = 0, groups_per_page: int = 16, pending: int | None = None, **settings
) -> KVDriveConfig:
    """A config with small segments for small tests: a page is `groups_per_page` x 16 tokens, a seal one page."""
    page = groups_per_page * 16
    settings = {"dense_below": 0, "segment_tokens": 8 * page, **settings}
    return KVDriveConfig(
        budget=Budget.parse(budget, floor_entries=floor),
        chunk_size=layout.chunk_size,
        groups_per_page=groups_per_page,
        pending_tokens=page if pending is None else pending,
        **settings,
    )


def minimum_slots(layout: KVLayout, config: KVDriveConfig, max_tokens: int) -> int:
    """Slots that one sequence of `max_tokens` needs, whichever way it is served."""
    dense = config.dense_slots(layout, min(config.dense_below, max_tokens))
    return max(config.slots_of(layout, max_tokens).total, dense)


def make_engine(
    layout: KVLayout,
    config: KVDriveConfig,
    *,
    max_tokens: int,
    n_sequences: int = 1,
    slots: int | None = None,
    blocks: int | None = None,
) -> KVDriveEngine:
    """An engine with room for all its sequences, or exactly `slots` HBM slots and `blocks` DRAM blocks."""
    slots = minimum_slots(layout, config, max_tokens) * n_sequences if slots is None else slots
    blocks = n_sequences * ceil_div(max_tokens, 64) if blocks is None else blocks
    config = config.resolve(hbm_bytes=slots * layout.slot_bytes, dram_bytes=blocks * layout.block_bytes)
    return KVDriveEngine(layout, config, n_sequences=n_sequences, max_tokens=max_tokens)


@dataclass(frozen=True)
class Tokens:
    """q `[L, n, H_q, D]`, k and v `[L, n, H_kv, D]` of a whole sequence."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def expected(self, scale: float) -> torch.Tensor:
        """Full causal attention, float64, `[L, n, H_q, D]`."""
        return torch.stack([full_attention(*layer, scale) for layer in zip(self.q, self.k, self.v, strict=True)])


def random_tokens(layout: KVLayout, n_tokens: int, seed: int = 0, q_gain: float = 1.0) -> Tokens:
    generator = torch.Generator().manual_seed(seed)

    def draw(n_heads: int) -> torch.Tensor:
        return torch.randn(layout.n_layers, n_tokens, n_heads, layout.head_dim, generator=generator).to(layout.dtype)

    return Tokens(draw(layout.n_q_heads) * q_gain, draw(layout.n_kv_heads), draw(layout.n_kv_heads))


class Driver:
    """Feeds sequences into an engine as a server would: pieces of prompts, then batches of steps."""

    def __init__(self, engine: KVDriveEngine):
        self.engine = engine
        self.layout = engine.layout
        self.scale = engine.layout.head_dim**-0.5
        self.tokens: dict[int, Tokens] = {}

    def done(self, seq_id: int) -> int:
        return int(self.engine.book.n_tokens[seq_id])

    def begin(self, seq_id: int, tokens: Tokens) -> None:
        self.tokens[seq_id] = tokens
        self.engine.begin(seq_id)

    def prefill_pass(self, lengths: dict[int, int]) -> dict[int, torch.Tensor]:
        """One forward pass with a piece of each sequence. Returns outputs `[L, length, H_q, D]` by sequence."""
        seq_ids = list(lengths)
        prefix = [self.done(s) for s in seq_ids]
        for seq_id in seq_ids:
            self.engine.extend(seq_id, self.done(seq_id) + lengths[seq_id])
        plan = self.engine.begin_prefill(seq_ids, prefix, list(lengths.values()))
        pieces = [slice(p, p + lengths[s]) for s, p in zip(seq_ids, prefix, strict=True)]
        out = torch.stack([self._prefill_layer(plan, layer, seq_ids, pieces) for layer in range(self.layout.n_layers)])
        return dict(zip(seq_ids, out.split(list(lengths.values()), dim=1), strict=True))

    def _prefill_layer(self, plan, layer, seq_ids, pieces):
        parts = [(self.tokens[s], piece) for s, piece in zip(seq_ids, pieces, strict=True)]
        q, k, v = (torch.cat([getattr(t, name)[layer, piece] for t, piece in parts]) for name in "qkv")
        return self.engine.prefill(plan, layer, q, k, v, self.scale)

    def prefill(self, seq_id: int, n_tokens: int, piece: int) -> torch.Tensor:
        """A whole prompt in pieces. Returns `[L, n_tokens, H_q, D]`."""
        outs = []
        while self.done(seq_id) < n_tokens:
            outs.append(self.prefill_pass({seq_id: min(piece, n_tokens - self.done(seq_id))})[seq_id])
        return torch.cat(outs, dim=1)

    def step(self, seq_ids: list[int]) -> torch.Tensor:
        """One decode step of a batch. Returns `[L, B, H_q, D]`."""
        assert self.engine.can_step(seq_ids)
        at = [self.done(s) for s in seq_ids]
        for seq_id, n in zip(seq_ids, at, strict=True):
            self.engine.extend(seq_id, n + 1)
        plan = self.engine.begin_step(torch.tensor(seq_ids))
        return torch.stack([self.decode_layer(plan, layer, seq_ids, at) for layer in range(self.layout.n_layers)])

    def decode_layer(self, plan, layer, seq_ids, at):
        q, k, v = (
            torch.stack([getattr(self.tokens[s], name)[layer, n] for s, n in zip(seq_ids, at, strict=True)]) for name in "qkv"
        )
        return self.engine.decode(plan, layer, q, k, v, self.scale)

    def steps(self, seq_ids: list[int], n_steps: int) -> torch.Tensor:
        """Several steps of one batch. Returns `[L, n_steps, B, H_q, D]`."""
        return torch.stack([self.step(seq_ids) for _ in range(n_steps)], dim=1)

    def release(self, seq_id: int) -> None:
        self.engine.release(seq_id, free_blocks=True)

    def assert_empty(self) -> None:
        self.engine.check_integrity()
        assert self.engine.hbm.n_used == 0
        assert self.engine.dram.n_used == 0


def largest_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest deviation; NaN, if any, is larger than all."""
    deviation = (out.double() - expected).abs()
    return float("inf") if deviation.isnan().any() else float(deviation.max())
