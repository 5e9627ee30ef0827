"""Stage S against the slow selection: groups by score, exactly the budget, the last group cut by chunk score."""

import pytest
import torch
from kvsupport.driver import Driver, make_config, make_engine, make_layout, random_tokens
from kvsupport.full_attention import as_float64
from kvsupport.inspect import chunk_means, groups_of
from kvsupport.selection import select


def begin_step(driver, seq_ids, gain):
    """The part of the step that selects, and random queries `[b, H_kv, G, D]` for it."""
    engine, layout = driver.engine, driver.layout
    for seq_id in seq_ids:
        engine.extend(seq_id, driver.done(seq_id) + 1)
    plan = engine.begin_step(torch.tensor(seq_ids))
    (part,) = (p for p in plan.parts if p.n_wanted is not None)
    return part, gain * torch.randn(len(part.at), layout.n_kv_heads, layout.q_per_kv, layout.head_dim)


@pytest.mark.parametrize("chunk_size", [1, 2, 4, 8])
@pytest.mark.parametrize("q_per_kv", [1, 3])
@pytest.mark.parametrize("gain", [1.0, 6.0])
def test_the_selection_is_that_of_the_slow_rule(chunk_size, q_per_kv, gain):
    layout = make_layout(chunk_size=chunk_size, q_per_kv=q_per_kv)
    config = make_config(layout, budget="12.5%", groups_per_page=4, segment_tokens=256)
    driver = Driver(make_engine(layout, config, max_tokens=700, n_sequences=3))
    for seq_id, n_tokens in enumerate((699, 300, 77)):
        driver.begin(seq_id, random_tokens(layout, 700, seed=seq_id))
        driver.prefill(seq_id, n_tokens, 700)
    part, q = begin_step(driver, [2, 0, 1], gain)
    for layer in range(2):
        selection = driver.engine.schedule.selector.select(layer, part, q, driver.scale)
        for b, seq_id in enumerate(part.seq_ids.tolist()):
            n_wanted = int(part.n_wanted[b])
            for head in range(2):
                groups = groups_of(driver.engine, layer, seq_id, head)
                means = chunk_means(driver.tokens[seq_id].k[layer, :, head], chunk_size)
                expected = select(as_float64(q[b, head]), groups, means, n_wanted, driver.scale)
                got = selection.chunk_ids[b, head].tolist()
                assert set(got[:n_wanted]) == set(expected)
                assert len(set(expected)) == n_wanted
                assert set(got[n_wanted:]) <= {-1}
                for chunk, group in zip(got[:n_wanted], selection.group_ids[b, head].tolist(), strict=False):
                    assert chunk in groups[group].members


@pytest.mark.parametrize(("budget", "floor"), [("12.5%", 0), ("100tok", 0), ("1tok", 0), ("1%", 50), ("100%", 0)])
@pytest.mark.parametrize("chunk_size", [1, 4, 8])
def test_exactly_the_budget_is_selected(budget, floor, chunk_size):
    layout = make_layout(layers=1, chunk_size=chunk_size)
    config = make_config(layout, budget=budget, floor=floor, groups_per_page=4)
    driver = Driver(make_engine(layout, config, max_tokens=501))
    driver.begin(0, random_tokens(layout, 501))
    driver.prefill(0, 500, 500)
    driver.step([0])
    entries = {"12.5%": 63, "100tok": 100, "1tok": 1, "1%": 50, "100%": 500}[budget]
    n_indexed = (500 - 64) // chunk_size - driver.engine.config.sink_chunks
    n_chunks = min(-(-entries // chunk_size), n_indexed)
    stats = driver.engine.stats
    assert stats.selected_chunks == stats.hits + stats.misses == n_chunks * layout.n_pairs
    steady = 501 - n_indexed * chunk_size
    assert stats.attended_entries == (steady + n_chunks * chunk_size) * layout.n_pairs
    assert stats.attended_entries <= config.attended_at_most(501) * layout.n_pairs


def test_bfloat16_queries_select_like_float32_ones_of_the_same_value():
    layout = make_layout(layers=1, dtype=torch.bfloat16)
    driver = Driver(make_engine(layout, make_config(layout, budget="10%", groups_per_page=4), max_tokens=401))
    driver.begin(0, random_tokens(layout, 401))
    driver.prefill(0, 400, 400)
    part, q = begin_step(driver, [0], 2.0)
    rounded, exact = (
        driver.engine.schedule.selector.select(0, part, x, driver.scale)
        for x in (q.to(torch.bfloat16), q.to(torch.bfloat16).float())
    )
    assert torch.equal(rounded.chunk_ids, exact.chunk_ids)
