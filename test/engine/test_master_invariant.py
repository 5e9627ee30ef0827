"""For one budget, outputs do not depend on windows, eviction or the size of HBM: not by a bit."""

import itertools

import pytest
import torch
from kvsupport.driver import Driver, make_config, make_engine, make_layout, minimum_slots, random_tokens

LAYOUT = make_layout(layers=2, kv_heads=2, q_per_kv=2, head_dim=16)
PROMPT, STEPS = 1500, 170
MAX_TOKENS = PROMPT + STEPS
WINDOWS, EVICTIONS = (1, 1.5, 2, 4), ("lookahead", "lru", "fifo")


@pytest.fixture(scope="module")
def tokens():
    """Queries that drift: neighbours select much of the same, as in a real model."""
    drawn = random_tokens(LAYOUT, MAX_TOKENS, seed=5, q_gain=2.0)
    for n in range(1, MAX_TOKENS):
        drawn.q[:, n] = 0.9 * drawn.q[:, n - 1] + 0.44 * drawn.q[:, n]
    return drawn


def run(tokens, *, window=2, eviction="lookahead", spare_slots=0, dirty=False, in_place=False) -> torch.Tensor:
    """6.25% of 1,500 tokens and more than four seals of generated tokens (32 each)."""
    settings = {"window_multiple": window, "eviction": eviction, "in_place": in_place}
    config = make_config(LAYOUT, budget="6.25%", groups_per_page=2, segment_tokens=512, **settings)
    slots = minimum_slots(LAYOUT, config, MAX_TOKENS) + spare_slots
    driver = Driver(make_engine(LAYOUT, config, max_tokens=MAX_TOKENS, n_sequences=2, slots=slots))
    if dirty:  # other slots in another order, and stale bytes in all of them
        driver.begin(1, random_tokens(LAYOUT, 200, seed=6))
        driver.prefill(1, 150, 150)
        driver.steps([1], 3)
        driver.release(1)
    before = driver.engine.stats.as_dict()
    driver.begin(0, tokens)
    driver.prefill(0, PROMPT, 257)
    out = driver.steps([0], STEPS)
    did = {name: value - before[name] for name, value in driver.engine.stats.as_dict().items()}
    assert did["seals"] == 3 + 5
    moves = (did["hits"], did["misses"], did["evictions"], did["bytes_fetched"])
    assert max(moves) == 0 if in_place else min(moves) > 0
    assert did["selected_chunks"] > 0
    assert did["bytes_fetched"] == did["misses"] * LAYOUT.slot_bytes
    assert did["attended_entries"] < 0.3 * did["stored_entries"]
    driver.engine.check_integrity()
    return out


@pytest.fixture(scope="module")
def reference(tokens):
    return run(tokens)


@pytest.mark.parametrize(("window", "eviction"), [c for c in itertools.product(WINDOWS, EVICTIONS) if c != (2, "lookahead")])
def test_windows_and_eviction_do_not_change_a_bit(tokens, reference, window, eviction):
    assert torch.equal(run(tokens, window=window, eviction=eviction), reference)


@pytest.mark.parametrize("spare_slots", [1, 5000])
def test_the_size_of_hbm_does_not_change_a_bit(tokens, reference, spare_slots):
    assert torch.equal(run(tokens, spare_slots=spare_slots), reference)


def test_attending_in_place_does_not_change_a_bit(tokens, reference):
    assert torch.equal(run(tokens, in_place=True), reference)


def test_what_lay_in_the_slots_before_does_not_change_a_bit(tokens, reference):
    assert torch.equal(run(tokens, dirty=True), reference)


def test_a_larger_window_fetches_less():
    """Otherwise the equality above would be cheap: the runs must really differ in what they move."""
    layout = make_layout(layers=1)
    tokens = random_tokens(layout, 640, seed=7)
    fetched = []
    for window in WINDOWS:
        config = make_config(layout, budget="10%", groups_per_page=2, window_multiple=window)
        driver = Driver(make_engine(layout, config, max_tokens=640))
        driver.begin(0, tokens)
        driver.prefill(0, 600, 600)
        driver.steps([0], 40)
        fetched.append(driver.engine.stats.bytes_fetched)
    assert fetched == sorted(fetched, reverse=True)
    assert fetched[-1] < fetched[0]
