"""The plan of a step: which steady tokens count, who selects, and how much is attended."""

import pytest
import torch
from kvsupport.driver import Driver, make_config, make_engine, make_layout, random_tokens


def plan_of(driver, seq_ids):
    for seq_id in seq_ids:
        driver.engine.extend(seq_id, driver.done(seq_id) + 1)
    return driver.engine.begin_step(torch.tensor(seq_ids))


def driver_with(prompts, **settings) -> Driver:
    layout = make_layout(chunk_size=settings.pop("chunk_size", 4))
    config = make_config(layout, groups_per_page=4, **settings)
    driver = Driver(make_engine(layout, config, max_tokens=800, n_sequences=len(prompts)))
    for seq_id, n_tokens in enumerate(prompts):
        driver.begin(seq_id, random_tokens(layout, 800, seed=seq_id))
        driver.prefill(seq_id, n_tokens, 300)
    return driver


@pytest.mark.parametrize("chunk_size", [1, 2, 4, 8])
def test_steady_tokens_are_counted_to_the_token(chunk_size):
    prompts = [1, 3, 4, 5, 63, 68, 69, 70, 300]
    driver = driver_with(prompts, budget="1tok", chunk_size=chunk_size)
    plan = plan_of(driver, list(range(len(prompts))))
    sink = driver.engine.config.sink_chunks * chunk_size
    for b, n_prompt in enumerate(prompts):
        n_indexed = max(0, (n_prompt - 64) // chunk_size * chunk_size - sink)
        assert int(plan.attended[b]) == n_prompt + 1 - n_indexed + (chunk_size if n_indexed else 0)


def test_a_batch_is_split_into_those_that_select_and_those_that_do_not():
    driver = driver_with([300, 10, 400, 20], budget="10%")
    plan = plan_of(driver, [3, 0, 1, 2])
    exact, sparse = plan.parts
    assert (exact.seq_ids.tolist(), exact.at.tolist(), exact.n_wanted) == ([3, 1], [0, 2], None)
    assert (sparse.seq_ids.tolist(), sparse.at.tolist(), sparse.n_wanted.tolist()) == ([0, 2], [1, 3], [8, 10])


def test_the_new_token_goes_to_its_own_place():
    driver = driver_with([300, 10], budget="10%")
    plan = plan_of(driver, [0, 1])
    assert plan.inside.tolist() == [0, 2]
    layout, blocks = driver.layout, driver.engine.book.blocks
    for b, (block, place) in enumerate([(int(blocks[0, 4]), (300 % 64) // 4), (int(blocks[1, 0]), 10 // 4)]):
        heads = [(block * layout.n_layers * 2 + h) * layout.chunks_per_block + place for h in range(2)]
        assert plan.rows[b].tolist() == heads
    assert plan.slots.unique().numel() == plan.slots.numel()


@pytest.mark.parametrize("n_prompt", [1, 60, 68, 69, 200, 700])
@pytest.mark.parametrize("budget", ["1tok", "6.25%", "50%", "100%"])
def test_no_step_attends_more_than_announced(n_prompt, budget):
    driver = driver_with([n_prompt], budget=budget)
    for _ in range(80):
        plan = plan_of(driver, [0])
        n_tokens = driver.done(0)
        assert int(plan.attended[0]) <= driver.engine.config.attended_at_most(n_tokens) <= n_tokens
