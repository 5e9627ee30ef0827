"""Plain PyTorch twin of `attend_pieces`: torch's flash attention per stretch of keys, merged by log-sum-exp."""

from __future__ import annotations

import torch

from kvdrive_kernels.attend_prefix.reference import attend_prefix
from kvdrive_kernels.attend_slots.reference import cap_logits
from kvdrive_kernels.merge_state.reference import merge_state

STRETCH_TOKENS = 2048
"""Earlier tokens attended at a time: bounds the buffer whatever the prompt's length."""
QUERY_TOKENS = 64
"""Query tokens attended at a time where all their logits are held."""


def attend_pieces(
    q: torch.Tensor,
    home: torch.Tensor,
    layer: int,
    blocks: torch.Tensor,
    seq_ids: torch.Tensor,
    starts: torch.Tensor,
    prefix: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    logit_cap: float = 0.0,
    window: int = 0,
) -> torch.Tensor:
    """Causal attention of pieces of several prompts over everything up to each token. K and V lie at home already.

    Args:
        q: `[T, H_q, D]`, the pieces one after the other; only the last two dimensions need be contiguous.
        home: `[blocks, L, H_kv, chunks_per_block, 2, C, D]`, same dtype as q; a block holds 64 tokens.
        layer: which L.
        blocks: `[sequences, n]` int64, home blocks of every sequence.
        seq_ids: `[N]` int64, rows of `blocks`, one per piece.
        starts: `[N]` int64, first row of each piece in q.
        prefix: `[N]` int64, tokens of the sequence before the piece.
        lengths: `[N]` int64, tokens of the piece.
        scale: factor on q·k.
        logit_cap: logits become `logit_cap * tanh(logit / logit_cap)`; 0: they stay.
        window: each token sees only itself and the `window - 1` before it; 0: all before it.

    Returns:
        `[T, H_q, D]` in the dtype of q.
    """
    out = torch.empty(q.shape, dtype=q.dtype)
    for seq_id, start, before, length in zip(*(t.tolist() for t in (seq_ids, starts, prefix, lengths)), strict=True):
        piece = q[start : start + length]
        places = (piece, home[:, layer], blocks[seq_id], before, scale)
        found = _attend_masked(*places, logit_cap, window) if logit_cap or window else _attend_piece(*places)
        out[start : start + length] = found
    return out


def _attend_piece(q: torch.Tensor, home: torch.Tensor, blocks: torch.Tensor, before: int, scale: float) -> torch.Tensor:
    """One sequence: causal over the piece, full over what came before."""
    n_tokens, n_q_heads, dim = q.shape
    n_kv_heads = home.shape[1]
    q = q.view(n_tokens, n_kv_heads, n_q_heads // n_kv_heads, dim).permute(1, 2, 0, 3)
    out, lse = attend_prefix(q, *_read(home, blocks, before, before + n_tokens), scale, causal=True)
    for start in range(0, before, STRETCH_TOKENS):
        keys, values = _read(home, blocks, start, min(before, start + STRETCH_TOKENS))
        out, lse = merge_state(out, lse, *attend_prefix(q, keys, values, scale, causal=False))
    return out.permute(2, 0, 1, 3).reshape(n_tokens, n_q_heads, dim).to(home.dtype)


def _attend_masked(q, home, blocks, before: int, scale: float, logit_cap: float, window: int) -> torch.Tensor:
    """As `_attend_piece`, with what torch's flash kernel does not do: `QUERY_TOKENS` query tokens at a time."""
    n_tokens, n_q_heads, dim = q.shape
    n_kv_heads = home.shape[1]
    out = torch.empty(q.shape, dtype=home.dtype)
    for start in range(0, n_tokens, QUERY_TOKENS):
        mine = q[start : start + QUERY_TOKENS].view(-1, n_kv_heads, n_q_heads // n_kv_heads, dim).permute(1, 2, 0, 3)
        position = before + start + torch.arange(mine.shape[2]).unsqueeze(1)
        first = max(0, before + start + 1 - window) if window else 0
        keys, values = (x.float().unsqueeze(1) for x in _read(home, blocks, first, int(position[-1]) + 1))
        at = torch.arange(first, int(position[-1]) + 1)
        hidden = (at > position) | (at <= position - window) if window else at > position
        logits = cap_logits(mine.float() @ keys.transpose(-1, -2) * scale, logit_cap).masked_fill(hidden, float("-inf"))
        attended = (torch.softmax(logits, dim=-1) @ values).permute(2, 0, 1, 3)
        out[start : start + QUERY_TOKENS] = attended.reshape(-1, n_q_heads, dim).to(home.dtype)
    return out


def _read(home: torch.Tensor, blocks: torch.Tensor, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[H_kv, stop - first, D]` of a run of tokens. home: one layer's."""
    block_tokens = home.shape[2] * home.shape[4]
    used = blocks[first // block_tokens : -(-stop // block_tokens)]
    chunks = home[used].transpose(0, 1)  # [H_kv, n, chunks, 2, C, D]
    skip = first // block_tokens * block_tokens
    keys, values = (chunks[:, :, :, i].reshape(home.shape[1], -1, home.shape[5])[:, first - skip : stop - skip] for i in (0, 1))
    return keys, values
