"""What a sparse step attends is exactly sink + selected + not yet indexed: nothing less, nothing more."""

import pytest
import torch
from kvsupport.driver import EXACT, Driver, largest_error, make_config, make_engine, make_layout, random_tokens
from kvsupport.full_attention import as_float64, attend_tokens
from kvsupport.inspect import chunk_means, groups_of
from kvsupport.selection import select


def attended_tokens(driver, seq_id, layer, head, q, n_wanted):
    """Positions that the step of the newest token must attend: chosen by the slow selection, the rest by elimination."""
    chunk_size, n_tokens = driver.layout.chunk_size, driver.done(seq_id)
    groups = groups_of(driver.engine, layer, seq_id, head)
    indexed = {c for g in groups for c in g.members}
    means = chunk_means(driver.tokens[seq_id].k[layer, :n_tokens, head], chunk_size)
    chosen = set(select(as_float64(q), groups, means, n_wanted, driver.scale)) if n_wanted else set()
    return [t for t in range(n_tokens) if t // chunk_size not in indexed or t // chunk_size in chosen]


def check_step(driver, seq_ids, budget, tolerance):
    """One decode step of a batch, every output against float64 attention over exactly the tokens it should read."""
    engine, layout = driver.engine, driver.layout
    at = [driver.done(s) for s in seq_ids]
    for seq_id, n in zip(seq_ids, at, strict=True):
        engine.extend(seq_id, n + 1)
    plan = engine.begin_step(torch.tensor(seq_ids))
    n_attended = {s: 0 for s in seq_ids}
    for layer in range(layout.n_layers):
        out = driver.decode_layer(plan, layer, seq_ids, at)
        for b, (seq_id, n) in enumerate(zip(seq_ids, at, strict=True)):
            tokens = driver.tokens[seq_id]
            q = tokens.q[layer, n].view(layout.n_kv_heads, layout.q_per_kv, layout.head_dim)
            n_wanted = min(budget // layout.chunk_size, int(engine.index.n_chunks[seq_id]))
            sets = [attended_tokens(driver, seq_id, layer, head, q[head], n_wanted) for head in range(layout.n_kv_heads)]
            expected = attend_tokens(tokens.q[layer, n], tokens.k[layer, : n + 1], tokens.v[layer, : n + 1], sets, driver.scale)
            assert largest_error(out[b], expected) < tolerance
            n_attended[seq_id] += sum(map(len, sets))
    assert (plan.attended * layout.n_pairs).tolist() == [n_attended[s] for s in seq_ids]
    return plan


@pytest.mark.parametrize("chunk_size", [1, 2, 4, 8])
@pytest.mark.parametrize("gain", [1.0, 5.0])
def test_a_step_reads_sink_selected_and_local_tokens_only(chunk_size, gain):
    layout = make_layout(layers=2, kv_heads=2, q_per_kv=3, chunk_size=chunk_size)
    config = make_config(layout, budget="32tok", groups_per_page=1, segment_tokens=256, local_tokens=20, window_multiple=1.5)
    driver = Driver(make_engine(layout, config, max_tokens=700, n_sequences=3))
    prompts = {0: 600, 1: 90, 2: 20}
    for seq_id, n_tokens in prompts.items():
        driver.begin(seq_id, random_tokens(layout, 700, seed=seq_id, q_gain=gain))
        driver.prefill(seq_id, n_tokens, 257)
    for _ in range(40):
        check_step(driver, [0, 1, 2], 32, EXACT * gain)  # logits, and what rounding does to them, grow with the queries
    stats = driver.engine.stats
    assert stats.attended_entries < stats.stored_entries
    assert stats.seals >= 3 + 1 + 2 * 2
    assert min(stats.hits, stats.misses, stats.evictions) > 0
    driver.engine.check_integrity()


def test_sink_and_local_tokens_are_attended_whatever_the_budget():
    """With one chunk of budget: keys that a query likes best lie in the sink and in the local zone, and are found."""
    layout = make_layout(layers=1, kv_heads=1, q_per_kv=1, head_dim=32)
    config = make_config(layout, budget="1tok", groups_per_page=1)
    driver = Driver(make_engine(layout, config, max_tokens=700))
    tokens = random_tokens(layout, 700, seed=11)
    loud = torch.nn.functional.one_hot(torch.tensor(7), 32) * 12.0
    driver.begin(0, tokens)
    driver.prefill(0, 500, 500)
    for n in range(500, 700):
        liked = (0, 3, n - 63, n - 5, n)[n % 5]  # within 64 of the newest, or in the sink of 4
        k = tokens.k[0].clone()
        tokens.k[0, liked, 0] = tokens.q[0, n, 0] = loud
        out = _step_with_stored_key(driver, n, liked)
        assert largest_error(out[0, 0, 0], tokens.v[0, liked, 0].double()) < 1e-2
        tokens.k[0] = k
        _write_key(driver, liked, k[liked])


def _step_with_stored_key(driver, n, liked):
    """A step of token n, after the key of an earlier token was changed wherever the engine keeps it."""
    if liked != n:
        _write_key(driver, liked, driver.tokens[0].k[0, liked])
    return driver.step([0])


def _write_key(driver, position, key):
    """Overwrite a stored key, at home and in its steady slot."""
    engine, chunk_size = driver.engine, driver.layout.chunk_size
    block, offset = engine.book.blocks[0, position // 64], position % 64
    engine.dram.home[block, 0, :, offset // chunk_size, 0, offset % chunk_size] = key
    if engine.index.n_pages[0]:
        slots = engine.zones.slots_at(torch.tensor([0]), torch.tensor([[position // chunk_size]]))[0, 0, :, 0].long()
        engine.hbm.arena[slots, 0, position % chunk_size] = key
