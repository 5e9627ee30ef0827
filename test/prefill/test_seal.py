"""Sealing: every chunk is indexed once, and a centroid is the mean of what it stands for."""

import pytest
import torch
from kvsupport.driver import Driver, largest_error, make_config, make_engine, make_layout, random_tokens
from kvsupport.inspect import groups_of

CHUNK_SIZES = pytest.mark.parametrize("chunk_size", [1, 2, 4, 8])


def sealed_driver(n_tokens, n_steps=1, *, dtype=torch.float32, chunk_size=4, **settings) -> Driver:
    """A sequence that went through prefill and some decode steps, with segments of 4 pages of 64 tokens."""
    layout = make_layout(chunk_size=chunk_size, dtype=dtype)
    config = make_config(layout, groups_per_page=4, **{"segment_tokens": 256, **settings})
    driver = Driver(make_engine(layout, config, max_tokens=n_tokens + n_steps))
    driver.begin(0, random_tokens(layout, n_tokens + n_steps, seed=3))
    driver.prefill(0, n_tokens, 100)
    driver.steps([0], n_steps)
    return driver


@CHUNK_SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_centroid_is_the_mean_key_of_its_members(chunk_size, dtype):
    driver = sealed_driver(700, 70, chunk_size=chunk_size, dtype=dtype)
    keys = driver.tokens[0].k.double()
    assert driver.engine.stats.seals == 3 + 1
    for layer in range(2):
        for head in range(2):
            for group in groups_of(driver.engine, layer, 0, head):
                if not group.members:
                    assert (group.centroid == 0).all()
                    continue
                means = [keys[layer, c * chunk_size : (c + 1) * chunk_size, head].mean(0) for c in group.members]
                expected = torch.stack(means).mean(0)
                error = largest_error(torch.from_numpy(group.centroid), expected)
                assert error < 1e-6 if dtype == torch.float32 else error < 2**-8 * float(expected.abs().max())


@CHUNK_SIZES
@pytest.mark.parametrize("n_tokens", [1, 5, 68, 69, 76, 84, 300, 700])
def test_everything_between_sink_and_local_is_in_exactly_one_group(chunk_size, n_tokens):
    driver = sealed_driver(n_tokens, 1, chunk_size=chunk_size)
    sink = driver.engine.config.sink_chunks
    end = max(sink, (n_tokens - 64) // chunk_size)
    for layer in range(2):
        for head in range(2):
            members = sorted(c for g in groups_of(driver.engine, layer, 0, head) for c in g.members)
            assert members == list(range(sink, end))
    assert driver.engine.stats.sealed_tokens == (end - sink) * chunk_size


def test_generated_tokens_are_sealed_when_the_pending_zone_is_full():
    layout = make_layout()
    driver = Driver(make_engine(layout, make_config(layout, groups_per_page=4), max_tokens=400))
    driver.begin(0, random_tokens(layout, 400))
    driver.prefill(0, 200, 200)
    indexed = []
    for _ in range(200):
        driver.step([0])
        indexed.append(int(driver.engine.index.n_chunks[0]))
        driver.engine.check_integrity()
    prompt = (200 - 64 - 4) // 4
    assert indexed == [prompt] * 64 + [prompt + 16] * 64 + [prompt + 32] * 64 + [prompt + 48] * 8
    assert driver.engine.stats.seals == 1 + 3


def test_segments_do_not_depend_on_the_pieces_of_the_prompt():
    layout = make_layout()
    config = make_config(layout, groups_per_page=4, segment_tokens=256)
    found = []
    for piece in (64, 257, 700):
        driver = Driver(make_engine(layout, config, max_tokens=701))
        driver.begin(0, random_tokens(layout, 701, seed=3))
        driver.prefill(0, 700, piece)
        driver.step([0])
        found.append([(g.members, g.centroid.tolist()) for g in groups_of(driver.engine, 1, 0, 1)])
    assert found[0] == found[1] == found[2]


def test_nothing_is_sealed_while_the_prompt_is_incomplete():
    layout = make_layout()
    driver = Driver(make_engine(layout, make_config(layout, groups_per_page=4), max_tokens=701))
    driver.begin(0, random_tokens(layout, 701))
    driver.prefill(0, 700, 100)
    assert driver.engine.stats.seals == 0
    assert driver.engine.hbm.n_used == 0
