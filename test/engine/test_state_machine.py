"""Sequences come, grow and go in random order: after every move all books balance, and every output is right."""

from collections import Counter
from typing import ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from kvsupport.driver import EXACT, Driver, largest_error, make_config, make_engine, make_layout, random_tokens
from sglang_kvdrive.values import Mode

MAX_TOKENS = 330
N_SEQUENCES = 4
STEPS = st.sampled_from([70, 20, 3, 1])
TOKENS = {c: random_tokens(make_layout(chunk_size=c), MAX_TOKENS, seed=21) for c in (1, 2, 4, 8)}
EXPECTED = TOKENS[4].expected(16**-0.5)
"""All sequences are prefixes of one text (the engine shares nothing between them): one oracle serves all."""


class Lives(RuleBasedStateMachine):
    """Four ids, an arena for less than two of them, seals of 64 generated tokens."""

    budget, dense_below, in_place = "100%", 0, False
    seen: ClassVar[Counter] = Counter()

    @initialize(
        chunk_size=st.sampled_from([1, 2, 4, 8]),
        eviction=st.sampled_from(["lookahead", "lru", "fifo"]),
        window=st.sampled_from([1, 1.5, 2]),
    )
    def build(self, chunk_size, eviction, window):
        layout = make_layout(chunk_size=chunk_size)
        config = make_config(
            layout,
            budget=self.budget,
            groups_per_page=4,
            segment_tokens=128,
            eviction=eviction,
            window_multiple=window,
            dense_below=self.dense_below,
            in_place=self.in_place,
        )
        slots = int(1.7 * config.slots_of(layout, MAX_TOKENS).total)
        self.driver = Driver(make_engine(layout, config, max_tokens=MAX_TOKENS, n_sequences=N_SEQUENCES, slots=slots))
        self.engine, self.tokens, self.is_full = self.driver.engine, TOKENS[chunk_size], self.budget == "100%"
        self.decodes: set[int] = set()

    def live(self) -> list[int]:
        return self.engine.book.active()

    def prefilling(self) -> list[int]:
        return [s for s in self.live() if s not in self.decodes and self.driver.done(s) < MAX_TOKENS - 1]

    def free_id(self) -> int | None:
        return next((s for s in range(N_SEQUENCES) if s not in self.live()), None)

    @rule()
    def begin(self):
        if (seq_id := self.free_id()) is not None:
            self.driver.begin(seq_id, self.tokens)

    @rule(n_tokens=st.sampled_from([300, 200, 140, 90, 65, 1]), piece=st.sampled_from([64, 100, 257]), n_steps=STEPS)
    def begin_and_decode(self, n_tokens, piece, n_steps):
        if (seq_id := self.free_id()) is not None:
            self.driver.begin(seq_id, self.tokens)
            assert largest_error(self.driver.prefill(seq_id, n_tokens, piece), EXPECTED[:, :n_tokens]) < EXACT
            self.decode_batch([seq_id], n_steps)

    @rule(data=st.data())
    def prefill(self, data):
        """One forward pass with pieces of some sequences."""
        chosen = data.draw(st.sets(st.sampled_from(self.prefilling()), min_size=1)) if self.prefilling() else ()
        lengths = {s: data.draw(st.integers(1, min(150, MAX_TOKENS - 1 - self.driver.done(s)))) for s in chosen}
        begins = {s: self.driver.done(s) for s in chosen}
        for seq_id, out in (self.driver.prefill_pass(lengths) if lengths else {}).items():
            first = begins[seq_id]
            assert largest_error(out, EXPECTED[:, first : first + lengths[seq_id]]) < EXACT

    @rule(data=st.data(), n_steps=STEPS)
    def decode(self, data, n_steps):
        ready = [s for s in self.live() if self.driver.done(s)]
        self.decode_batch(data.draw(st.permutations(ready))[: data.draw(st.integers(1, N_SEQUENCES))], n_steps)

    def decode_batch(self, batch, n_steps):
        """Steps of one batch; whoever has no room is retracted, whoever is at the end stays behind."""
        for _ in range(n_steps):
            batch = [s for s in batch if self.driver.done(s) < MAX_TOKENS]
            while batch and not self.engine.can_step(batch):
                self.leave(batch.pop())
                self.seen["retractions"] += 1
            if not batch:
                return
            at = [self.driver.done(s) for s in batch]
            out = self.driver.step(batch)
            self.decodes.update(batch)
            assert not out.isnan().any()
            for b, n in enumerate(at):
                if self.is_full:
                    assert largest_error(out[:, b], EXPECTED[:, n]) < EXACT

    @rule(data=st.data())
    def release(self, data):
        if self.live():
            self.leave(data.draw(st.sampled_from(self.live())))

    def leave(self, seq_id):
        self.driver.release(seq_id)
        self.decodes.discard(seq_id)
        assert self.engine.hbm.n_held(seq_id) == 0

    @rule()
    def clear(self):
        if len(self.live()) < 3:
            return
        self.engine.clear()
        self.decodes.clear()
        assert self.engine.hbm.n_used == self.engine.dram.n_used == 0

    @invariant()
    def books_balance(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.check_integrity()
        assert engine.hbm.n_used + engine.hbm.n_free == engine.hbm.n_slots
        assert engine.dram.n_used + engine.dram.n_free == engine.dram.n_blocks
        stats = engine.stats
        assert stats.hits + stats.misses == (0 if self.in_place else stats.selected_chunks)
        assert stats.bytes_fetched == stats.misses * self.driver.layout.slot_bytes
        assert stats.attended_entries <= stats.stored_entries
        if self.is_full:
            assert stats.attended_entries == stats.stored_entries
        for seq_id in range(N_SEQUENCES):
            if engine.book.mode[seq_id] == Mode.FREE:
                assert engine.slots_held(seq_id) == engine.hbm.n_held(seq_id) == 0
            elif engine.book.mode[seq_id] == Mode.SPARSE:
                self.check_windows(seq_id)

    def check_windows(self, seq_id):
        """Whatever is resident is indexed, and its bytes are those at home."""
        engine, chunk_size = self.engine, self.driver.layout.chunk_size
        resident = engine.windows.residents(1, seq_id, 1).long()
        assert ((resident >= engine.config.sink_chunks) & (resident * chunk_size < engine.book.sealed_end[seq_id])).all()
        n = int(engine.windows.n_entries[seq_id])
        books = (engine.windows._chunks[1, seq_id, 1, :n].tolist(), engine.windows._slots[1, seq_id, 1, :n].tolist())
        for chunk, slot in zip(*books, strict=True):
            if chunk >= 0:
                assert torch.equal(engine.hbm.arena[slot, 0], self.tokens.k[1, chunk * chunk_size : (chunk + 1) * chunk_size, 1])
                assert torch.equal(engine.hbm.arena[slot, 1], self.tokens.v[1, chunk * chunk_size : (chunk + 1) * chunk_size, 1])

    def teardown(self):
        if hasattr(self, "engine"):
            self.seen.update(self.engine.stats.as_dict())


@pytest.mark.parametrize("in_place", [False, True], ids=["arena", "in place"])
@pytest.mark.parametrize(("budget", "dense_below"), [("100%", 0), ("100%", 150), ("20tok", 150)])
def test_random_lives_keep_the_books_balanced_and_the_outputs_right(budget, dense_below, in_place):
    Lives.budget, Lives.dense_below, Lives.in_place = budget, dense_below, in_place
    Lives.seen.clear()
    run_state_machine_as_test(Lives, settings=settings(max_examples=12, stateful_step_count=30))
    happened = ["sparse_tokens", "seals", "selected_chunks", "bytes_streamed", "retractions"]
    happened += ["dense_tokens"] * (dense_below > 0)
    happened += [] if in_place else ["hits", "misses"]
    happened += ["evictions"] * (budget != "100%" and not in_place)  # a window for everything has no victims
    for name in happened:
        assert Lives.seen[name] > 0, f"no {name} in all these lives"
