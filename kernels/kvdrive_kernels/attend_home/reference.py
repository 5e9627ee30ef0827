"""Plain PyTorch twin of `attend_home`."""

from __future__ import annotations

import torch

from kvdrive_kernels.attend_slots.reference import attend_slots


def attend_home(
    q: torch.Tensor,
    home: torch.Tensor,
    layer: int,
    blocks: torch.Tensor,
    seq_ids: torch.Tensor,
    n_tokens: torch.Tensor,
    n_sink: torch.Tensor,
    zone_begin: torch.Tensor,
    chunk_ids: torch.Tensor,
    n_wanted: torch.Tensor,  # noqa: ARG001 - the padding of chunk_ids says the same
    scale: float,
    logit_cap: float = 0.0,
    window: int = 0,
) -> torch.Tensor:
    """Exact attention of one token per sequence over its sink, selected and zone chunks where they lie at home.

    Chunks are attended in ascending order, sink, selected, zone; fp32 accumulation.

    Args:
        q: `[B, H_kv, G, D]`.
        home: `[blocks, L, H_kv, chunks_per_block, 2, C, D]`, same dtype as q.
        layer: which L.
        blocks: `[sequences, n]` int64, home blocks of every sequence.
        seq_ids: `[B]` int64, rows of `blocks`.
        n_tokens: `[B]` int64, tokens stored.
        n_sink: `[B]` int64, chunks from 0 on that are always attended.
        zone_begin: `[B]` int64, chunks from here to the newest token are always attended.
        chunk_ids: `[B, H_kv, K]` int32, selected chunks in any order, -1 after the first `n_wanted`; all are whole, and lie
            between sink and zone.
        n_wanted: `[B]` int64.
        scale: factor on q·k.
        logit_cap: logits become `logit_cap * tanh(logit / logit_cap)`; 0: they stay.
        window: only the newest so many tokens count; 0: all.

    Returns:
        `[B, H_kv, G, D]` in the dtype of q.
    """
    n_batch, n_heads = q.shape[:2]
    n_layers, per_block, chunk_size = home.shape[1], home.shape[3], home.shape[5]
    stop = (n_tokens + chunk_size - 1) // chunk_size

    def steady(first: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        ids = first.unsqueeze(1) + torch.arange(int((end - first).max().clamp_min(0)))
        return ids.masked_fill(ids >= end.unsqueeze(1), -1).unsqueeze(1).expand(n_batch, n_heads, -1)

    selected = chunk_ids.long()
    order = selected.masked_fill(selected < 0, 2**62).argsort(dim=-1)
    ids = torch.cat([steady(torch.zeros_like(n_sink), n_sink), selected.gather(-1, order), steady(zone_begin, stop)], dim=-1)
    rest = n_tokens.view(-1, 1, 1) - ids * chunk_size  # tokens from the chunk's first one on
    counts = rest.clamp(0, chunk_size).masked_fill(ids < 0, 0)
    skipped = torch.minimum((rest - window).clamp_min(0), counts) if window else None
    places = ids.clamp_min(0)
    block = blocks[seq_ids.view(-1, 1, 1), places // per_block]
    heads = torch.arange(n_heads).view(1, -1, 1)
    rows = ((block * n_layers + layer) * n_heads + heads) * per_block + places % per_block
    return attend_slots(q, home.view(-1, 2, chunk_size, home.shape[6]), rows, counts, scale, logit_cap, skipped)
