"""A long generation at the default sizes: sink and local are never left out, and whatever was said once can be found."""

import pytest
import torch
from kvsupport.driver import Driver, make_config, make_engine, make_layout, random_tokens

LAYOUT = make_layout(layers=1, kv_heads=2, q_per_kv=1, head_dim=32)
PROMPT, NEW = 400, 4 * 256 + 160
PLANTED = (0, 3, 100, 250, 390, 399, 402, 500, 650, 700, 903, 1100, 1250, 1400, PROMPT + NEW - 60)
"""Positions: sink, prompt (sealed at once or kept local), and every segment of generated tokens."""
LOUD_KEY, LOUD_QUERY = 40.0, 12.0


def directions() -> torch.Tensor:
    """One direction of its own for each planted key, `[len(PLANTED), D]`."""
    return torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))[0][: len(PLANTED)]


def story():
    """Random tokens in which some keys are loud; every step asks for one of those that were said already."""
    tokens = random_tokens(LAYOUT, PROMPT + NEW, seed=13)
    keys = directions()
    for which, position in enumerate(PLANTED):
        tokens.k[0, position] = LOUD_KEY * keys[which]
    asked = []
    for n in range(PROMPT, PROMPT + NEW):
        said = [w for w, position in enumerate(PLANTED) if position <= n]
        asked.append(said[n % len(said)])
        tokens.q[0, n] = LOUD_QUERY * keys[asked[-1]]
    return tokens, asked


def run(window, eviction):
    config = make_config(LAYOUT, budget="64tok", window_multiple=window, eviction=eviction, segment_tokens=8192)
    driver = Driver(make_engine(LAYOUT, config, max_tokens=PROMPT + NEW))
    tokens, asked = story()
    driver.begin(0, tokens)
    driver.prefill(0, PROMPT, 257)
    out = driver.steps([0], NEW)[0, :, 0]
    driver.engine.check_integrity()
    return driver, tokens, asked, out


@pytest.fixture(scope="module")
def told():
    return run(2, "lookahead")


def test_every_planted_key_answers_whenever_it_is_asked_for(told):
    driver, tokens, asked, out = told
    for step, which in enumerate(asked):
        error = (out[step] - tokens.v[0, PLANTED[which]]).abs().max()
        assert error < 0.05, f"position {PLANTED[which]} was not found at position {PROMPT + step}"
    assert {PLANTED[w] for w in asked[-len(PLANTED) :]} == set(PLANTED)
    stats = driver.engine.stats
    assert stats.seals == 1 + 4
    assert stats.attended_entries < 0.5 * stats.stored_entries
    assert min(stats.hits, stats.misses, stats.evictions) > 0


def test_the_chunks_that_answer_are_resident(told):
    """The key asked for last, if it is indexed, was selected and so lies in the windows now."""
    driver, _, asked, _ = told
    sealed_end = int(driver.engine.book.sealed_end[0])
    last = max(n for n, which in enumerate(asked) if LAYOUT.chunk_size <= PLANTED[which] < sealed_end)
    assert len(asked) - last < len(PLANTED)
    for head in range(2):
        assert PLANTED[asked[last]] // LAYOUT.chunk_size in driver.engine.windows.residents(0, 0, head)


def test_over_a_thousand_tokens_windows_and_eviction_do_not_change_a_bit(told):
    driver, _, _, out = told
    other, _, _, other_out = run(1, "fifo")
    assert torch.equal(out, other_out)
    assert other.engine.stats.bytes_fetched > driver.engine.stats.bytes_fetched
