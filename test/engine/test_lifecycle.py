"""A sequence's life: it may cross the dense threshold, be retracted, or end in any state."""

import pytest
import torch
from kvsupport.driver import EXACT, Driver, largest_error, make_config, make_engine, make_layout, random_tokens
from sglang_kvdrive.errors import CapacityError, IntegrityError
from sglang_kvdrive.values import Mode

LAYOUT = make_layout()
DENSE_BELOW = 200


def make_driver(*, n_sequences=1, max_tokens=400, layout=LAYOUT, blocks=None, slots=None, **settings) -> Driver:
    config = make_config(layout, groups_per_page=1, segment_tokens=128, **settings)
    return Driver(make_engine(layout, config, max_tokens=max_tokens, n_sequences=n_sequences, blocks=blocks, slots=slots))


# -- the dense threshold -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk_size", "dense_below"), [(1, 130), (2, 130), (4, 100), (4, 128), (4, 130), (4, DENSE_BELOW), (8, 130)]
)
def test_a_sequence_that_outgrows_the_threshold_is_indexed_then(chunk_size, dense_below):
    layout = make_layout(chunk_size=chunk_size)
    driver = make_driver(layout=layout, dense_below=dense_below)
    first, last = dense_below - 12, dense_below + 28
    tokens = random_tokens(layout, last, seed=1)
    expected = tokens.expected(driver.scale)
    driver.begin(0, tokens)
    driver.prefill(0, first, 64)
    for n in range(first, last):
        assert largest_error(driver.step([0])[:, 0], expected[:, n]) < EXACT
        mode = "dense" if n + 1 <= dense_below else "sparse"
        assert driver.engine.sequence_stats(0).mode == mode
        driver.engine.check_integrity()
    stats = driver.engine.stats
    assert (stats.dense_tokens, stats.sparse_tokens) == (12, 28)
    assert stats.seals > 1
    assert stats.attended_entries == stats.stored_entries


@pytest.mark.parametrize(("n_prompt", "mode"), [(DENSE_BELOW - 1, "dense"), (DENSE_BELOW, "sparse")])
def test_the_threshold_counts_the_token_that_is_being_decoded(n_prompt, mode):
    driver = make_driver(dense_below=DENSE_BELOW)
    driver.begin(0, random_tokens(LAYOUT, n_prompt + 1))
    driver.prefill(0, n_prompt, 100)
    driver.step([0])
    assert driver.engine.sequence_stats(0).mode == mode


def test_dense_and_sparse_sequences_share_a_batch():
    driver = make_driver(n_sequences=3, dense_below=DENSE_BELOW)
    prompts = {0: 300, 1: 50, 2: 190}
    tokens = {s: random_tokens(LAYOUT, 400, seed=s) for s in prompts}
    for seq_id, n_tokens in prompts.items():
        driver.begin(seq_id, tokens[seq_id])
        driver.prefill(seq_id, n_tokens, 400)
    out = driver.steps([2, 0, 1], 30)
    for b, seq_id in enumerate([2, 0, 1]):
        n_tokens = prompts[seq_id]
        expected = tokens[seq_id].expected(driver.scale)[:, n_tokens : n_tokens + 30]
        assert largest_error(out[:, :, b], expected) < EXACT
    assert driver.engine.stats.dense_tokens == 30 + 10
    assert driver.engine.stats.sparse_tokens == 30 + 20


# -- retraction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 15, 16, 17, 50])
def test_a_retracted_sequence_continues_as_if_nothing_had_happened(at):
    """Released while decoding, prefilled again with everything it had, and continued: full attention throughout."""
    driver = make_driver(n_sequences=2, max_tokens=300)
    tokens = random_tokens(LAYOUT, 300, seed=2)
    expected = tokens.expected(driver.scale)
    driver.begin(0, tokens)
    driver.prefill(0, 150, 100)
    driver.steps([0], at)
    driver.release(0)
    driver.assert_empty()
    driver.begin(1, tokens)
    assert largest_error(driver.prefill(1, 150 + at, 100), expected[:, : 150 + at]) < EXACT
    assert largest_error(driver.steps([1], 60)[:, :, 0], expected[:, 150 + at : 210 + at]) < EXACT


@pytest.mark.parametrize("at", [10, 40])
def test_a_retracted_sequence_equals_one_that_had_that_prompt_from_the_start(at):
    """With a real budget: resealed as a prompt, so the same as a fresh sequence with the longer prompt, bit by bit."""
    tokens = random_tokens(LAYOUT, 300, seed=3)
    retracted, fresh = (make_driver(budget="10%") for _ in range(2))
    retracted.begin(0, tokens)
    retracted.prefill(0, 200, 100)
    retracted.steps([0], at)
    retracted.release(0)
    outs = []
    for driver in (retracted, fresh):
        driver.begin(0, tokens)
        driver.prefill(0, 200 + at, 100)
        outs.append(driver.steps([0], 40))
    assert torch.equal(*outs)
    assert fresh.engine.stats.attended_entries < fresh.engine.stats.stored_entries


# -- the end -------------------------------------------------------------------------------------------------------


def bring_to(driver, seq_id, state):
    if state == "free":
        return
    driver.begin(seq_id, random_tokens(LAYOUT, 400, seed=seq_id))
    match state:
        case "blocks given":
            driver.engine.extend(seq_id, 130)
        case "blocks given twice":
            driver.engine.extend(seq_id, 64)
            driver.engine.extend(seq_id, 130)
        case "in prefill":
            driver.prefill_pass({seq_id: 70})
        case "next piece's blocks given":
            driver.prefill_pass({seq_id: 70})
            driver.engine.extend(seq_id, 300)
        case "prefilled":
            driver.prefill(seq_id, 250, 100)
        case "dense":
            driver.prefill(seq_id, 100, 100)
            driver.steps([seq_id], 5)
        case "sparse":
            driver.prefill(seq_id, 250, 100)
            driver.steps([seq_id], 3)
        case "sealed while decoding":
            driver.prefill(seq_id, 250, 100)
            driver.steps([seq_id], 40)


STATES = ["free", "begun", "blocks given", "blocks given twice", "in prefill", "next piece's blocks given", "prefilled", "dense",
          "sparse", "sealed while decoding"]  # fmt: skip


@pytest.mark.parametrize("state", STATES)
def test_release_in_any_state_gives_everything_back(state):
    driver = make_driver(n_sequences=2, dense_below=DENSE_BELOW)
    bring_to(driver, 1, state)
    driver.engine.check_integrity()
    driver.release(1)
    driver.assert_empty()
    assert driver.engine.book.active() == []
    driver.release(1)  # once more is no harm
    driver.assert_empty()
    bring_to(driver, 1, "sparse")  # the id serves again


def test_clear_ends_all_sequences_in_all_states():
    driver = make_driver(n_sequences=len(STATES), dense_below=DENSE_BELOW)
    for seq_id, state in enumerate(STATES):
        bring_to(driver, seq_id, state)
    driver.engine.check_integrity()
    driver.engine.clear()
    driver.assert_empty()
    assert driver.engine.book.active() == []
    bring_to(driver, 0, "sparse")


def test_what_a_sequence_did_is_forgotten_when_its_id_begins_again():
    driver = make_driver()
    bring_to(driver, 0, "sparse")
    assert driver.engine.sequence_stats(0).steps == 3
    assert driver.engine.sequence_stats(0).hit_rate > 0
    driver.release(0)
    driver.engine.begin(0)
    stats = driver.engine.sequence_stats(0)
    assert (stats.steps, stats.hits, stats.misses, stats.attended, stats.hit_rate) == (0, 0, 0, 0, None)


def test_a_released_sequence_leaves_others_untouched():
    driver, alone = (make_driver(n_sequences=2, budget="10%") for _ in range(2))
    for d in (driver, alone):
        bring_to(d, 0, "sparse")
    bring_to(driver, 1, "sealed while decoding")
    driver.release(1)
    bring_to(driver, 1, "in prefill")
    assert torch.equal(driver.steps([0], 30), alone.steps([0], 30))


# -- misuse --------------------------------------------------------------------------------------------------------


def test_a_sequence_cannot_begin_twice():
    driver = make_driver()
    driver.engine.begin(0)
    with pytest.raises(IntegrityError, match="sequence 0 begins twice"):
        driver.engine.begin(0)


def test_a_prompt_continues_where_it_ended():
    driver = make_driver()
    driver.begin(0, random_tokens(LAYOUT, 100))
    driver.prefill_pass({0: 50})
    with pytest.raises(IntegrityError, match=r"prefill continues at \[40\], but \[50\] tokens are stored"):
        driver.engine.begin_prefill([0], [40], [10])


def test_dram_without_room_refuses_and_takes_nothing():
    driver = make_driver(n_sequences=2, blocks=3)
    driver.engine.begin(0)
    driver.engine.extend(0, 129)
    driver.engine.begin(1)
    with pytest.raises(CapacityError, match="0 of 192 tokens free, 64 are needed"):
        driver.engine.extend(1, 1)
    assert driver.engine.dram.n_used == 3
    driver.engine.check_integrity()


def test_a_sequence_for_which_hbm_had_no_room_can_be_released():
    driver = make_driver(n_sequences=2, slots=make_driver().engine.hbm.n_slots)
    bring_to(driver, 0, "sealed while decoding")
    bring_to(driver, 1, "prefilled")
    assert not driver.engine.can_step([1])
    driver.engine.extend(1, 251)
    with pytest.raises(CapacityError, match="slots free"):
        driver.engine.begin_step(torch.tensor([1]))
    driver.engine.check_integrity()
    driver.release(1)
    driver.steps([0], 5)
    driver.release(0)
    driver.assert_empty()
    assert int(driver.engine.book.mode.max()) == Mode.FREE
