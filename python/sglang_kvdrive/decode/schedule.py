"""In which order the stages of a layer run. `Sequential` is the oracle for every other schedule."""

from __future__ import annotations

import torch

from sglang_kvdrive.decode.attend import attend, attend_in_place
from sglang_kvdrive.decode.fetch import Fetcher
from sglang_kvdrive.decode.select import Selector
from sglang_kvdrive.decode.step import DecodePlan
from sglang_kvdrive.sequences import SequenceBook
from sglang_kvdrive.tiers.hbm import HbmTier
from sglang_kvdrive.tiers.transfer import Transfer


class Sequential:
    """Select, probe, fetch, attend: one part of the batch after the other, nothing overlaps."""

    def __init__(self, hbm: HbmTier, transfer: Transfer, selector: Selector, fetcher: Fetcher):
        self.hbm, self.transfer, self.selector, self.fetcher = hbm, transfer, selector, fetcher

    def decode_layer(
        self, plan: DecodePlan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store the new tokens of one layer and attend.

        Args:
            q: `[B, H_q, D]`. k, v: `[B, H_kv, D]`.

        Returns:
            `[B, H_q, D]`.
        """
        n_batch, n_kv_heads, dim = k.shape
        self.transfer.write_home(layer, plan.rows, plan.inside, k, v)
        self.transfer.append(plan.slots[layer], plan.inside, k, v)
        grouped = q.view(n_batch, n_kv_heads, -1, dim)
        out = torch.empty_like(grouped)
        for part in plan.parts:
            mine = grouped if part.whole else grouped[part.at]
            selection = lookup = None
            if part.n_wanted is not None:
                selection = self.selector.select(layer, part, mine, scale)
                lookup = self.fetcher.probe(layer, part, selection)
                self.fetcher.fetch(layer, part, selection, lookup)
            out[part.at] = attend(self.hbm, part, layer, mine, scale, selection, lookup)
        return out.view(n_batch, -1, dim)


class InPlace:
    """Select and attend, for a cpu whose only memory is DRAM: nothing is copied, so there is nothing to probe or fetch."""

    def __init__(self, book: SequenceBook, transfer: Transfer, selector: Selector):
        self.book, self.transfer, self.selector = book, transfer, selector

    def decode_layer(
        self, plan: DecodePlan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store the new tokens of one layer and attend, as `Sequential.decode_layer`."""
        n_batch, n_kv_heads, dim = k.shape
        self.transfer.write_home(layer, plan.rows, plan.inside, k, v)
        grouped = q.view(n_batch, n_kv_heads, -1, dim)
        outs = []
        for part in plan.parts:
            mine = grouped if part.whole else grouped[part.at]
            selection = None if part.n_wanted is None else self.selector.select(layer, part, mine, scale)
            self.transfer.stats.selected_chunks += part.n_selected
            outs.append(attend_in_place(self.book, self.transfer, part, layer, mine, scale, selection))
        if len(outs) == 1:
            return outs[0].view(n_batch, -1, dim)
        out = torch.empty_like(grouped)
        for part, mine in zip(plan.parts, outs, strict=True):
            out[part.at] = mine
        return out.view(n_batch, -1, dim)
