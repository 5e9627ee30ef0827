"""KVDriveEngine: the whole path of a token on one page. Runs without SGLang.

    begin -> prefill (pieces) -> decode (steps) -> release

The caller owns the home blocks of a sequence (SGLang's page allocator, or `extend` when the engine runs alone); the
engine owns everything in HBM and all books.
"""

from __future__ import annotations

import torch

from sglang_kvdrive.config import KVDriveConfig
from sglang_kvdrive.decode.fetch import Fetcher
from sglang_kvdrive.decode.schedule import InPlace, Sequential
from sglang_kvdrive.decode.select import Selector
from sglang_kvdrive.decode.step import DecodePlan, plan_decode
from sglang_kvdrive.device import CpuDevice
from sglang_kvdrive.errors import ConfigError, IntegrityError
from sglang_kvdrive.index.hierarchy import ChunkIndex
from sglang_kvdrive.layout import BLOCK_TOKENS, KVLayout, ceil_div
from sglang_kvdrive.prefill.ingest import PrefillPlan, plan_prefill, prefill_layer
from sglang_kvdrive.prefill.seal import Sealer
from sglang_kvdrive.sequences import SequenceBook
from sglang_kvdrive.stats import EngineStats
from sglang_kvdrive.tiers.dram import DramTier
from sglang_kvdrive.tiers.hbm import HbmTier
from sglang_kvdrive.tiers.transfer import Transfer
from sglang_kvdrive.values import Mode, SequenceStats
from sglang_kvdrive.window.window import Windows
from sglang_kvdrive.window.zone import SteadyZones


class KVDriveEngine:
    """Owns the rooms and a sequence's way through them.

    Args:
        layout: geometry of the model.
        config: resolved: `hbm_bytes`, `dram_bytes` and `dense_below` are numbers.
        n_sequences: sequence ids run from 0 to n_sequences - 1.
        max_tokens: longest sequence.
        device: where the memory lives.

    Raises:
        ConfigError: the arena cannot hold one sequence of `max_tokens` (the message says what it needs).
    """

    def __init__(
        self, layout: KVLayout, config: KVDriveConfig, *, n_sequences: int, max_tokens: int, device: CpuDevice | None = None
    ):
        check_fits(layout, config, max_tokens)
        self.layout, self.config, self.max_tokens = layout, config, max_tokens
        device = device or CpuDevice()
        self.stats = EngineStats()
        self.hbm = HbmTier(layout, config.hbm_bytes // layout.slot_bytes, device)
        self.dram = DramTier(layout, config.dram_bytes // layout.block_bytes, device)
        self.transfer = Transfer(self.hbm, self.dram, self.stats)
        self.book = SequenceBook(n_sequences, max_tokens)
        n_pages = ceil_div(self.dram.capacity_tokens, config.page_tokens) + n_sequences
        self.index = ChunkIndex(layout, config, n_sequences=n_sequences, max_tokens=max_tokens, n_pages=n_pages)
        dense_places = config.dense_slots(layout, config.dense_below) // layout.n_pairs
        max_places = 0 if config.in_place else max(config.sink_chunks + config.zone_chunks, dense_places)
        self.zones = SteadyZones(layout, n_sequences=n_sequences, max_places=max_places, sink_chunks=config.sink_chunks)
        max_entries = 0 if config.in_place else config.window_chunks(max_tokens)
        self.windows = Windows(layout, n_sequences=n_sequences, max_entries=max_entries, eviction=config.eviction)
        self.sealer = Sealer(layout, config, self.book, self.index, self.hbm, self.transfer)
        selector = Selector(self.book, self.index, self.hbm, self.transfer)
        if config.in_place:
            self.schedule = InPlace(self.book, self.transfer, selector)
        else:
            fetcher = Fetcher(self.book, self.windows, selector, self.transfer)
            self.schedule = Sequential(self.hbm, self.transfer, selector, fetcher)

    # -- life of a sequence ----------------------------------------------------------------------------------------

    def begin(self, seq_id: int) -> None:
        """A new sequence. Its id must be free."""
        if self.book.mode[seq_id] != Mode.FREE:
            raise IntegrityError(f"sequence {seq_id} begins twice")
        self.book.begin(seq_id)

    def expect(self, seq_id: int, n_prompt: int) -> None:
        """Say how long the whole prompt is, of which pieces may have come: its HBM is kept free until it decodes."""
        self.book.prompt[seq_id] = n_prompt

    def extend(self, seq_id: int, n_tokens: int) -> None:
        """Give a sequence home blocks up to `n_tokens`, for callers without an allocator of their own.

        Raises:
            CapacityError: DRAM has no room; nothing was taken.
        """
        held = int(self.book.n_given[seq_id])
        needed = ceil_div(n_tokens, BLOCK_TOKENS) - held
        if needed > 0:
            self.book.bind_blocks(seq_id, held, self.dram.allocate(needed))
            self.book.n_given[seq_id] = held + needed

    def begin_prefill(self, seq_ids: list[int], prefix: list[int], lengths: list[int]) -> PrefillPlan:
        """Plan one forward pass of prompt pieces. Their home blocks are bound already.

        Args:
            prefix: tokens of each sequence that are stored already.
            lengths: new tokens of each.
        """
        stored = [int(self.book.n_tokens[s]) for s in seq_ids]
        if stored != prefix:
            raise IntegrityError(f"prefill continues at {prefix}, but {stored} tokens are stored")
        if not bool((self.book.mode[seq_ids] == Mode.PREFILL).all()):
            raise IntegrityError(f"prefill of a sequence among {seq_ids} that has not begun or decodes already")
        for seq_id, done, length in zip(seq_ids, prefix, lengths, strict=True):
            self.book.n_tokens[seq_id] = done + length
        self.stats.prefill_tokens += sum(lengths)
        return plan_prefill(self.book, self.transfer, seq_ids, prefix, lengths)

    def prefill(
        self, plan: PrefillPlan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One layer of a prefill pass: q `[T, H_q, D]`, k and v `[T, H_kv, D]`, returns `[T, H_q, D]`."""
        return prefill_layer(plan, self.book, self.transfer, layer, q, k, v, scale)

    def begin_step(self, seq_ids: torch.Tensor) -> DecodePlan:
        """Plan one decode step: one new token for each sequence, whose home block is bound already.

        Sequences that come from prefill are placed (dense) or sealed (sparse) here, dense ones that outgrow
        `dense_below` become sparse, and full pending zones are sealed.

        Raises:
            CapacityError: HBM has no room. `can_step` says so beforehand.
        """
        for seq_id in seq_ids[self._needs_preparation(seq_ids)].tolist():
            self._prepare(seq_id)
        self.book.n_tokens[seq_ids] += 1
        self.windows.tick()
        plan = plan_decode(self.layout, self.config, self.book, self.zones, self.index, self.transfer, seq_ids)
        self._count(plan)
        return plan

    def decode(
        self, plan: DecodePlan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One layer of a decode step: q `[B, H_q, D]`, k and v `[B, H_kv, D]`, returns `[B, H_q, D]`."""
        return self.schedule.decode_layer(plan, layer, q, k, v, scale)

    def release(self, seq_id: int, *, free_blocks: bool = False) -> None:
        """End a sequence in any state. HBM and books return; home blocks too if the engine gave them (`extend`)."""
        if self.book.mode[seq_id] == Mode.FREE:
            return
        for room in (self.zones, self.windows, self.index):
            self.hbm.release(room.release(seq_id), seq_id)
        if free_blocks:
            self.dram.release(self.book.blocks[seq_id, : int(self.book.n_given[seq_id])])
        self.book.end(seq_id)

    def clear(self) -> None:
        """Release every sequence and forget all home blocks (a flush)."""
        for seq_id in self.book.active():
            self.release(seq_id)
        self.dram.clear()

    # -- HBM planning ------------------------------------------------------------------------------------------------

    def slots_needed(self, seq_id: int, n_tokens: int) -> int:
        """HBM slots that the sequence needs at most to decode its `n_tokens`-th token."""
        if self._stays_dense(seq_id, n_tokens):
            return self.config.dense_slots(self.layout, n_tokens)
        return self.config.slots_of(self.layout, n_tokens).total

    def slots_held(self, seq_id: int) -> int:
        rooms = (
            self.zones.n_places[seq_id],
            self.windows.n_entries[seq_id],
            self.index.n_pages[seq_id] * self.index.slots_per_page,
        )
        return int(sum(rooms)) * self.layout.n_pairs

    def can_step(self, seq_ids: list[int]) -> bool:
        """Whether all these sequences can decode their next token with the HBM there is."""
        growth = sum(max(0, self.slots_needed(s, int(self.book.n_tokens[s]) + 1) - self.slots_held(s)) for s in seq_ids)
        return growth <= self.hbm.n_free

    def slots_outstanding(self) -> int:
        """HBM slots that sequences in the engine have not taken yet but will: prompts in flight, and the next seal of
        the decoding ones."""
        total = 0
        for seq_id in self.book.active():
            n_tokens = int(self.book.n_tokens[seq_id])
            if self.book.mode[seq_id] == Mode.PREFILL:
                total += self.slots_promised(max(n_tokens, int(self.book.prompt[seq_id])))
            else:
                ahead = min(n_tokens + self.config.pending_tokens, self.max_tokens)
                peak = self.slots_needed(seq_id, ahead)
                if self.book.mode[seq_id] == Mode.DENSE:  # it may take more while it is still dense than when it is sparse
                    peak = max(peak, self.config.dense_slots(self.layout, min(ahead, self.config.dense_below)))
                total += max(0, peak - self.slots_held(seq_id))
        return total

    def slots_promised(self, n_tokens: int) -> int:
        """HBM slots that a sequence not yet begun will need when its prompt of `n_tokens` is done."""
        n_next = min(n_tokens + 1, self.max_tokens)
        if n_next <= self.config.dense_below:
            return self.config.dense_slots(self.layout, n_next)
        return self.config.slots_of(self.layout, n_next).total

    # -- views ---------------------------------------------------------------------------------------------------------

    def sequence_stats(self, seq_id: int) -> SequenceStats:
        mode = Mode(int(self.book.mode[seq_id]))
        name = "sparse" if mode is Mode.SPARSE else "dense"
        budget = int(self.book.budget_chunks[seq_id]) * self.layout.chunk_size
        return SequenceStats(name, budget, **{key: int(values[seq_id]) for key, values in self.book.counts.items()})

    def check_integrity(self) -> None:
        """Every tier and every room balances, and together they account for every slot and block.

        Raises:
            IntegrityError: they do not.
        """
        for room in (self.hbm, self.dram, self.index, self.windows, self.zones):
            room.check_integrity()
        active = self.book.active()
        held = sum(self.slots_held(s) for s in active)
        if held != self.hbm.n_used:
            raise IntegrityError(f"sequences hold {held} HBM slots, the tier counts {self.hbm.n_used}")
        homes = [self.book.blocks[s, : self.book.n_blocks(s)] for s in active]
        blocks = torch.cat(homes) if homes else torch.empty(0, dtype=torch.int64)
        if torch.unique(blocks).numel() != blocks.numel() or not self.dram.is_used(blocks):
            raise IntegrityError("a sequence's home block is free, or is the home of two")

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _stays_dense(self, seq_id: int, n_tokens: int) -> bool:
        """Up to `dense_below` everything is attended; once indexed, a sequence stays sparse."""
        return self.book.mode[seq_id] != Mode.SPARSE and n_tokens <= self.config.dense_below

    def _needs_preparation(self, seq_ids: torch.Tensor) -> torch.Tensor:
        """`[B]` bool: sequences that cannot simply take one more token, as nearly all can in nearly all steps."""
        n_next = self.book.n_tokens[seq_ids] + 1
        mode = self.book.mode[seq_ids]
        zone_tokens = self.config.local_tokens + self.config.pending_tokens
        sparse_ready = (mode == Mode.SPARSE) & (n_next - self.book.sealed_end[seq_ids] <= zone_tokens)
        placed = self.config.dense_below if self.config.in_place else self.zones.n_places[seq_ids] * self.layout.chunk_size
        room = torch.as_tensor(placed).clamp(max=self.config.dense_below)
        return ~(sparse_ready | (mode == Mode.DENSE) & (n_next <= room))

    def _prepare(self, seq_id: int) -> None:
        """Bring a sequence into the state in which it can take one more token."""
        n_tokens = int(self.book.n_tokens[seq_id])
        mode = int(self.book.mode[seq_id])
        if self._stays_dense(seq_id, n_tokens + 1):
            self._grow_dense(seq_id, n_tokens + 1, place=mode == Mode.PREFILL)
            self.book.mode[seq_id] = Mode.DENSE
        elif mode != Mode.SPARSE:
            self._become_sparse(seq_id, n_tokens)
        elif n_tokens - int(self.book.sealed_end[seq_id]) >= self.config.local_tokens + self.config.pending_tokens:
            end = int(self.book.sealed_end[seq_id])
            self.sealer.seal(seq_id, end, end + self.config.pending_tokens)
            self._widen(seq_id, n_tokens)

    def _grow_dense(self, seq_id: int, n_tokens: int, *, place: bool) -> None:
        if self.config.in_place:
            return
        missing = self.config.dense_slots(self.layout, n_tokens) - int(self.zones.n_places[seq_id]) * self.layout.n_pairs
        if missing > 0:
            self.zones.grow(seq_id, self.hbm.allocate(missing, seq_id))
        if place:
            self._place(seq_id, torch.arange(ceil_div(n_tokens - 1, self.layout.chunk_size)))

    def _become_sparse(self, seq_id: int, n_tokens: int) -> None:
        """Index what can be indexed and keep the rest in a steady zone."""
        self.hbm.release(self.zones.release(seq_id), seq_id)
        self.book.mode[seq_id] = Mode.SPARSE
        self.sealer.seal_prompt(seq_id)
        if not self.config.in_place:
            chunk_size, sink = self.layout.chunk_size, self.config.sink_chunks
            n_places = (sink + self.config.zone_chunks) * self.layout.n_pairs
            self.zones.grow(seq_id, self.hbm.allocate(n_places, seq_id))
            n_chunks = ceil_div(n_tokens, chunk_size)
            local = torch.arange(min(int(self.book.sealed_end[seq_id]) // chunk_size, n_chunks), n_chunks)
            self._place(seq_id, torch.cat([torch.arange(min(sink, n_chunks)), local]))
        self._widen(seq_id, n_tokens)

    def _widen(self, seq_id: int, n_tokens: int) -> None:
        """Fit budget and window to the tokens stored now. Both only grow."""
        self.book.budget_chunks[seq_id] = self.config.budget_chunks(n_tokens)
        if self.config.in_place:
            return
        wanted = int(self.config.window_multiple * self.config.budget_chunks(n_tokens))
        missing = min(wanted, int(self.index.n_chunks[seq_id])) - int(self.windows.n_entries[seq_id])
        if missing > 0:
            self.windows.grow(seq_id, self.hbm.allocate(missing * self.layout.n_pairs, seq_id))

    def _place(self, seq_id: int, chunk_ids: torch.Tensor) -> None:
        """Copy steady chunks from home into the zone, all layers and heads."""
        slots = self.zones.slots_at(torch.tensor([seq_id]), chunk_ids.unsqueeze(0))[:, 0].long()
        layout = self.layout
        blocks = self.book.blocks[seq_id, chunk_ids // layout.chunks_per_block]
        layers = torch.arange(layout.n_layers).view(-1, 1, 1)
        heads = torch.arange(layout.n_kv_heads).view(1, -1, 1)
        rows = self.transfer.home_rows(layers, blocks, heads, chunk_ids % layout.chunks_per_block)
        self.transfer.place(rows.flatten(), slots.flatten())

    def _count(self, plan: DecodePlan) -> None:
        stored = self.book.n_tokens[plan.seq_ids]
        pairs, counts, stats = self.layout.n_pairs, self.book.counts, self.stats
        counts["steps"][plan.seq_ids] += 1
        counts["attended"][plan.seq_ids] += plan.attended * pairs
        counts["stored"][plan.seq_ids] += stored * pairs
        n_dense = int((self.book.mode[plan.seq_ids] == Mode.DENSE).sum())
        stats.decode_steps += 1
        stats.decoded_tokens += plan.seq_ids.numel()
        stats.dense_tokens += n_dense
        stats.sparse_tokens += plan.seq_ids.numel() - n_dense
        stats.attended_entries += int(plan.attended.sum()) * pairs
        stats.stored_entries += int(stored.sum()) * pairs


def check_fits(layout: KVLayout, config: KVDriveConfig, max_tokens: int) -> None:
    """Refuse sizes that cannot serve one sequence of `max_tokens`.

    Raises:
        ConfigError: with every reason; each names what is there and what is needed.
    """
    reasons = []
    needed = config.slots_of(layout, max_tokens).total * layout.slot_bytes
    dense = config.dense_slots(layout, min(config.dense_below, max_tokens)) * layout.slot_bytes
    if config.hbm_bytes < needed:
        reasons.append(
            f"--kvdrive-hbm is {config.hbm_bytes} bytes, one sequence of {max_tokens} tokens needs {needed} bytes: "
            f"raise --kvdrive-hbm to {needed}B, or lower --context-length, --kvdrive-budget or --kvdrive-window"
        )
    elif config.hbm_bytes < dense:
        reasons.append(
            f"--kvdrive-dense-below is {config.dense_below} tokens, which takes {dense} bytes of HBM for one sequence, "
            f"--kvdrive-hbm is {config.hbm_bytes} bytes: lower --kvdrive-dense-below or raise --kvdrive-hbm"
        )
    home = ceil_div(max_tokens, BLOCK_TOKENS) * layout.block_bytes
    if config.dram_bytes < layout.block_bytes:
        reasons.append(
            f"--kvdrive-dram is {config.dram_bytes} bytes, not even one block of {BLOCK_TOKENS} tokens "
            f"({layout.block_bytes} bytes): a sequence of {max_tokens} tokens needs {home} bytes"
        )
    if reasons:
        raise ConfigError(reasons)
