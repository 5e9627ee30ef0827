"""HBM planning: whoever asks first is never surprised, and the minimum is exact."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvsupport.driver import Driver, make_config, make_engine, make_layout, minimum_slots, random_tokens
from sglang_kvdrive.engine import check_fits
from sglang_kvdrive.errors import ConfigError
from sglang_kvdrive.values import Mode

LAYOUT = make_layout(layers=1, kv_heads=1, q_per_kv=1, head_dim=4)
MAX_TOKENS = 220
N_SEQUENCES = 6

CONFIGS = st.builds(
    lambda budget, local, window, dense_below, pending: make_config(
        LAYOUT, budget=budget, groups_per_page=1, pending=pending, segment_tokens=64, local_tokens=local, window_multiple=window,
        dense_below=dense_below,
    ),
    st.sampled_from(["8tok", "10%", "50%", "100%"]),
    st.sampled_from([1, 8, 30]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 70, 128, 150, MAX_TOKENS]),
    st.sampled_from([16, 32]),
)  # fmt: skip


class Crowd:
    """Many sequences in an arena made for few. Does not compute: only the books matter here."""

    def __init__(self, config, slots):
        self.engine = make_engine(LAYOUT, config, max_tokens=MAX_TOKENS, n_sequences=N_SEQUENCES, slots=slots)
        self.prompt: dict[int, int] = {}
        self.promised: dict[int, int] = {}

    def begin(self, seq_id, n_prompt):
        engine = self.engine
        self.promised[seq_id] = engine.slots_promised(n_prompt)
        engine.begin(seq_id)
        engine.expect(seq_id, n_prompt)
        self.prompt[seq_id] = n_prompt

    def prefill(self, seq_id, n_tokens):
        """The next piece. Returns whether the prompt is complete."""
        done = int(self.engine.book.n_tokens[seq_id])
        length = min(n_tokens, self.prompt[seq_id] - done)
        if length > 0:
            self.engine.extend(seq_id, done + length)
            plan = self.engine.begin_prefill([seq_id], [done], [length])
            k, v = torch.randn(length, 1, 4), torch.randn(length, 1, 4)
            self.engine.prefill(plan, 0, torch.randn(length, 1, 4), k, v, 0.5)
        return done + length == self.prompt[seq_id]

    def step(self, seq_ids):
        """One step, if there is room for all. `begin_step` must agree with what was said before."""
        engine = self.engine
        n_next = {s: int(engine.book.n_tokens[s]) + 1 for s in seq_ids}
        needed = {s: engine.slots_needed(s, n_next[s]) for s in seq_ids}
        if not engine.can_step(seq_ids):
            return False
        first = [s for s in seq_ids if engine.book.mode[s] == Mode.PREFILL]
        for seq_id in seq_ids:
            engine.extend(seq_id, n_next[seq_id])
        plan = engine.begin_step(torch.tensor(seq_ids))  # must not raise
        n = len(seq_ids)
        engine.decode(plan, 0, torch.randn(n, 1, 4), torch.randn(n, 1, 4), torch.randn(n, 1, 4), 0.5)
        for seq_id in seq_ids:
            assert engine.slots_held(seq_id) <= needed[seq_id]
        for seq_id in first:
            assert engine.slots_held(seq_id) <= self.promised[seq_id]
        return True

    def release(self, seq_id):
        self.engine.release(seq_id, free_blocks=True)
        self.prompt.pop(seq_id)


@settings(max_examples=15)
@given(st.data(), CONFIGS)
def test_a_step_that_was_allowed_never_runs_out_of_hbm(data, config):
    least = minimum_slots(LAYOUT, config, MAX_TOKENS)
    crowd = Crowd(config, int(least * data.draw(st.sampled_from([1, 1.3, 2.5]))))
    for _ in range(data.draw(st.integers(5, 25))):
        free = [s for s in range(N_SEQUENCES) if s not in crowd.prompt]
        if free and data.draw(st.booleans()):
            n_prompt = data.draw(st.integers(1, MAX_TOKENS - 1))
            crowd.begin(free[0], n_prompt)
        ready = [s for s in crowd.prompt if crowd.prefill(s, data.draw(st.integers(20, 220)))]
        batch = [s for s in ready if crowd.engine.book.n_tokens[s] < MAX_TOKENS and data.draw(st.integers(0, 3))]
        for _ in range(data.draw(st.integers(1, 12))):
            batch = [s for s in batch if crowd.engine.book.n_tokens[s] < MAX_TOKENS]
            while batch and not crowd.step(batch):
                crowd.release(batch.pop())  # retraction: the last one gives way
        crowd.engine.check_integrity()
        for seq_id in [s for s in crowd.prompt if crowd.engine.book.n_tokens[s] >= MAX_TOKENS]:
            crowd.release(seq_id)
    for seq_id in list(crowd.prompt):
        crowd.release(seq_id)
    assert crowd.engine.hbm.n_used == crowd.engine.dram.n_used == 0


@settings(max_examples=10)
@given(CONFIGS, st.integers(1, MAX_TOKENS - 1))
def test_outstanding_slots_cover_a_sequence_until_its_next_seal(config, n_prompt):
    crowd = Crowd(config, 3 * minimum_slots(LAYOUT, config, MAX_TOKENS))
    engine = crowd.engine
    crowd.begin(0, n_prompt)
    while not crowd.prefill(0, 100):
        assert engine.slots_outstanding() == crowd.promised[0]
    assert engine.slots_outstanding() == crowd.promised[0]
    promise, until = crowd.promised[0], n_prompt + 1
    while engine.book.n_tokens[0] < MAX_TOKENS:
        assert crowd.step([0])
        assert engine.slots_held(0) <= promise
        if engine.book.n_tokens[0] >= until:
            promise = engine.slots_held(0) + engine.slots_outstanding()
            until = int(engine.book.n_tokens[0]) + config.pending_tokens


# -- the minimum ---------------------------------------------------------------------------------------------------

MINIMA = pytest.mark.parametrize(
    "settings_",
    [
        {"budget": "6.25%", "window_multiple": 2},
        {"budget": "100%", "window_multiple": 1},
        {"budget": "24tok", "window_multiple": 1, "sink_tokens": 0, "local_tokens": 1},
        {"budget": "10%", "window_multiple": 4, "sink_tokens": 9, "local_tokens": 17},
        {"budget": "8tok", "window_multiple": 1, "dense_below": 200},
    ],
)


def layout_and_config(chunk_size, settings_):
    layout = make_layout(layers=2, kv_heads=2, q_per_kv=1, head_dim=4, chunk_size=chunk_size)
    return layout, make_config(layout, groups_per_page=1, segment_tokens=64, **settings_)


@MINIMA
@pytest.mark.parametrize("chunk_size", [1, 4])
def test_the_minimum_serves_one_longest_sequence_to_its_end(chunk_size, settings_):
    layout, config = layout_and_config(chunk_size, settings_)
    engine = make_engine(layout, config, max_tokens=MAX_TOKENS, slots=minimum_slots(layout, config, MAX_TOKENS))
    driver = Driver(engine)
    fullest = 0
    for n_prompt in (1, MAX_TOKENS - 1):
        driver.begin(0, random_tokens(layout, MAX_TOKENS))
        driver.prefill(0, n_prompt, 100)
        for _ in range(n_prompt, MAX_TOKENS):
            driver.step([0])  # asserts that it may
            fullest = max(fullest, engine.hbm.n_used)
        driver.release(0)
    driver.assert_empty()
    if not config.dense_below:
        # The newest token is never indexed: by that one chunk the minimum may be on the safe side, and by no more.
        assert engine.hbm.n_slots - fullest <= layout.n_pairs


@MINIMA
def test_one_slot_less_is_refused_with_both_numbers(settings_):
    layout, config = layout_and_config(4, settings_)
    least = minimum_slots(layout, config, MAX_TOKENS) * layout.slot_bytes
    with pytest.raises(ConfigError) as refusal:
        make_engine(layout, config, max_tokens=MAX_TOKENS, slots=least // layout.slot_bytes - 1)
    message = str(refusal.value)
    assert f"--kvdrive-hbm is {least - layout.slot_bytes} bytes" in message
    assert str(least) in message
    assert "raise --kvdrive-hbm" in message


def test_all_faults_of_the_sizes_come_at_once():
    layout, config = layout_and_config(4, {"budget": "10%"})
    with pytest.raises(ConfigError) as refusal:
        check_fits(layout, config.resolve(hbm_bytes=10, dram_bytes=layout.block_bytes - 1), MAX_TOKENS)
    assert len(refusal.value.reasons) == 2
    assert f"--kvdrive-dram is {layout.block_bytes - 1} bytes, not even one block of 64 tokens" in refusal.value.reasons[1]


def test_a_dense_threshold_beyond_the_arena_is_refused():
    layout, config = layout_and_config(4, {"budget": "8tok", "dense_below": 200, "window_multiple": 1})
    sparse = config.slots_of(layout, MAX_TOKENS).total
    assert sparse < minimum_slots(layout, config, MAX_TOKENS)
    with pytest.raises(ConfigError, match=r"--kvdrive-dense-below is 200 tokens, which takes \d+ bytes of HBM"):
        make_engine(layout, config, max_tokens=MAX_TOKENS, slots=sparse)
