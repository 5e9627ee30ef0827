"""Stages H and F: which selected chunks are resident, and bring the others from home."""

from __future__ import annotations

from sglang_kvdrive.decode.select import Selector
from sglang_kvdrive.decode.step import Part
from sglang_kvdrive.sequences import SequenceBook
from sglang_kvdrive.tiers.transfer import Transfer
from sglang_kvdrive.values import Lookup, Selection
from sglang_kvdrive.window.window import Windows


class Fetcher:
    """Probes the windows and fills the slots of misses."""

    def __init__(self, book: SequenceBook, windows: Windows, selector: Selector, transfer: Transfer):
        self.book, self.windows, self.selector, self.transfer = book, windows, selector, transfer

    def probe(self, layer: int, part: Part, selection: Selection) -> Lookup:
        """Stage H."""
        lookup = self.windows.probe(layer, part.seq_ids, selection)
        stats, counts = self.transfer.stats, self.book.counts
        counts["hits"][part.seq_ids] += lookup.n_hits
        counts["misses"][part.seq_ids] += lookup.n_misses
        stats.hits += int(lookup.n_hits.sum())
        stats.misses += int(lookup.n_misses.sum())
        stats.evictions += int(lookup.n_evictions.sum())
        stats.selected_chunks += part.n_selected
        return lookup

    def fetch(self, layer: int, part: Part, selection: Selection, lookup: Lookup) -> None:
        """Stage F: returns when every selected chunk lies in its slot."""
        rows = self.selector.home_rows(layer, part.seq_ids, selection.chunk_ids)
        self.transfer.fetch(rows[lookup.misses], lookup.slot_ids[lookup.misses].long())
