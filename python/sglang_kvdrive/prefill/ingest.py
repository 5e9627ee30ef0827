"""The write path: a piece of a prompt goes home and attends everything before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kvdrive_kernels.attend_pieces import attend_pieces

from sglang_kvdrive.layout import BLOCK_TOKENS
from sglang_kvdrive.sequences import SequenceBook
from sglang_kvdrive.tiers.transfer import Transfer


@dataclass(frozen=True)
class PrefillPlan:
    """One forward pass of prefill pieces, the same for every layer.

    Attributes:
        seq_ids: `[N]` int64, sequences in the order of their tokens.
        starts: `[N]` int64, first row of each piece.
        prefix: `[N]` int64, tokens before the piece.
        lengths: `[N]` int64, tokens of the piece.
        rows, inside: home of every new token (`Transfer.home_places`).
        n_earlier: tokens of all prefixes together.
    """

    seq_ids: torch.Tensor
    starts: torch.Tensor
    prefix: torch.Tensor
    lengths: torch.Tensor
    rows: torch.Tensor
    inside: torch.Tensor
    n_earlier: int


def plan_prefill(
    book: SequenceBook, transfer: Transfer, seq_ids: list[int], prefix: list[int], lengths: list[int]
) -> PrefillPlan:
    """Where the new tokens go. The home blocks must have been bound."""
    ids, before, counts = torch.tensor(seq_ids), torch.tensor(prefix), torch.tensor(lengths)
    owner = torch.repeat_interleave(torch.arange(len(seq_ids)), counts)
    starts = counts.cumsum(0) - counts
    position = torch.arange(int(counts.sum())) - starts[owner] + before[owner]
    rows, inside = transfer.home_places(book.blocks[ids[owner], position // BLOCK_TOKENS], position % BLOCK_TOKENS)
    return PrefillPlan(ids, starts, before, counts, rows, inside, sum(prefix))


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
    transfer.write_home(layer, plan.rows, plan.inside, k, v)
    transfer.count_streamed(plan.n_earlier)
    return attend_pieces(q, transfer.home, layer, book.blocks, plan.seq_ids, plan.starts, plan.prefix, plan.lengths, scale)
