"""The write path: a piece of a prompt goes home and attends everything before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kvdrive_kernels.attend_prefix import attend_prefix
from kvdrive_kernels.merge_state import merge_state

from sglang_kvdrive.layout import BLOCK_TOKENS, ceil_div
from sglang_kvdrive.sequences import SequenceBook
from sglang_kvdrive.tiers.transfer import Transfer

STREAM_TOKENS = 2048
"""Earlier tokens attended at a time: bounds the prefill buffer whatever the prompt's length."""


@dataclass(frozen=True)
class PrefillPlan:
    """One forward pass of prefill pieces, the same for every layer.

    Attributes:
        seq_ids: sequences in the order of their tokens.
        prefix: tokens before the piece, per sequence.
        lengths: tokens of the piece, per sequence.
        blocks, offsets: `[T]` int64, home of every new token.
    """

    seq_ids: list[int]
    prefix: list[int]
    lengths: list[int]
    blocks: torch.Tensor
    offsets: torch.Tensor


def plan_prefill(book: SequenceBook, seq_ids: list[int], prefix: list[int], lengths: list[int]) -> PrefillPlan:
    """Where the new tokens go. The home blocks must have been bound."""
    counts = torch.tensor(lengths)
    owner = torch.repeat_interleave(torch.arange(len(seq_ids)), counts)
    starts = counts.cumsum(0) - counts
    position = torch.arange(int(counts.sum())) - starts[owner] + torch.tensor(prefix)[owner]
    blocks = book.blocks[torch.tensor(seq_ids)[owner], position // BLOCK_TOKENS]
    return PrefillPlan(seq_ids, prefix, lengths, blocks, position % BLOCK_TOKENS)


def prefill_layer(
    plan: PrefillPlan,
    book: SequenceBook,
    transfer: Transfer,
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Store K and V of the new tokens and attend causally over all tokens up to each.

    Args:
        q: `[T, H_q, D]`. k, v: `[T, H_kv, D]`, in the order of the plan.

    Returns:
        `[T, H_q, D]`.
    """
    transfer.write_home(layer, plan.blocks, plan.offsets, k, v)
    out = torch.empty_like(q)
    begin = 0
    for seq_id, prefix, length in zip(plan.seq_ids, plan.prefix, plan.lengths, strict=True):
        piece = slice(begin, begin + length)
        out[piece] = _attend_piece(book, transfer, layer, seq_id, prefix, q[piece], k[piece], v[piece], scale)
        begin += length
    return out


def _attend_piece(book, transfer, layer, seq_id, prefix, q, k, v, scale) -> torch.Tensor:
    """One sequence: causal over the piece, full over what came before, merged by log-sum-exp."""
    n_tokens, n_q_heads, dim = q.shape
    n_kv_heads = k.shape[1]
    q = q.view(n_tokens, n_kv_heads, n_q_heads // n_kv_heads, dim).permute(1, 2, 0, 3)
    out, lse = attend_prefix(q, k.transpose(0, 1), v.transpose(0, 1), scale, causal=True)
    for start in range(0, prefix, STREAM_TOKENS):
        count = min(STREAM_TOKENS, prefix - start)
        first = start // BLOCK_TOKENS
        blocks = book.blocks[seq_id, first : first + ceil_div(count, BLOCK_TOKENS)]
        keys, values = transfer.stream_blocks(layer, blocks, count)
        out, lse = merge_state(out, lse, *attend_prefix(q, keys, values, scale, causal=False))
    return out.permute(2, 0, 1, 3).reshape(n_tokens, n_q_heads, dim).to(v.dtype)
