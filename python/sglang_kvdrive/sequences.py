"""SequenceBook: how far each sequence has come. Plain arrays, one entry per sequence id."""

from __future__ import annotations

import torch

from sglang_kvdrive.layout import BLOCK_TOKENS, ceil_div
from sglang_kvdrive.values import Mode


class SequenceBook:
    """Lengths, modes and home blocks of all sequences.

    Args:
        n_sequences: sequence ids run from 0 to n_sequences - 1.
        max_tokens: longest sequence.
    """

    def __init__(self, n_sequences: int, max_tokens: int):
        self.n_sequences = n_sequences
        self.max_tokens = max_tokens
        self.mode = torch.full((n_sequences,), Mode.FREE, dtype=torch.int8)
        self.n_tokens = torch.zeros(n_sequences, dtype=torch.int64)
        """Tokens stored at home."""
        self.sealed_end = torch.zeros(n_sequences, dtype=torch.int64)
        """First token after the index region; 0 while nothing is indexed."""
        self.prompt = torch.zeros(n_sequences, dtype=torch.int64)
        """Tokens of the whole prompt, if the caller said so."""
        self.budget_chunks = torch.zeros(n_sequences, dtype=torch.int64)
        self.blocks = torch.zeros(n_sequences, ceil_div(max_tokens, BLOCK_TOKENS) + 1, dtype=torch.int64)
        self.n_given = torch.zeros(n_sequences, dtype=torch.int64)
        """Home blocks that the engine itself gave the sequence, whether they hold tokens yet or not."""
        self.counts = {
            name: torch.zeros(n_sequences, dtype=torch.int64) for name in ("steps", "hits", "misses", "attended", "stored")
        }

    def begin(self, seq_id: int) -> None:
        self.mode[seq_id] = Mode.PREFILL
        self.n_tokens[seq_id] = self.sealed_end[seq_id] = self.budget_chunks[seq_id] = 0
        for values in self.counts.values():
            values[seq_id] = 0

    def end(self, seq_id: int) -> None:
        self.mode[seq_id] = Mode.FREE
        self.n_tokens[seq_id] = self.sealed_end[seq_id] = self.budget_chunks[seq_id] = 0
        self.prompt[seq_id] = 0
        self.n_given[seq_id] = 0
        self.blocks[seq_id] = 0

    def bind_blocks(self, seq_id: int, first: int, blocks: torch.Tensor) -> None:
        """Note the home blocks of a sequence from block position `first` on."""
        self.blocks[seq_id, first : first + blocks.numel()] = blocks

    def n_blocks(self, seq_id: int) -> int:
        """Home blocks of a sequence: those that hold its tokens, and those given in advance."""
        return max(ceil_div(int(self.n_tokens[seq_id]), BLOCK_TOKENS), int(self.n_given[seq_id]))

    def active(self) -> list[int]:
        return (self.mode != Mode.FREE).nonzero().flatten().tolist()
